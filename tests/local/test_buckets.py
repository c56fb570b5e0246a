"""Buckets of gradients leave for the sum over the pipelines while the rank still computes, in one sequence, and come back summed.

The other pipelines are played: a counterpart that has the same gradients, so that sums are W times the own ones.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from fxchimera.runtime.caller import Answer
from fxchimera.runtime.steps import buckets as module
from fxchimera.runtime.steps.buckets import Buckets
from tests.local.wrapped import wrap
from tests.models import MODELS
from tests.parity import full_batch, gradients_of

W = 3


class Echo:
    """Counterparts whose gradients are this rank's own; ``left`` are the moments at which buckets left, with their sizes."""

    size, through = W, None

    def __init__(self) -> None:
        self.left: list[tuple[float, int]] = []

    def begin_sum(self, buffer: torch.Tensor) -> Answer:
        self.left.append((time.perf_counter(), buffer.numel()))
        answer: Answer = Answer()
        threading.Thread(target=lambda: answer.put(buffer.mul_(W))).start()
        return answer

    def wait(self, answer: Answer, what: str) -> Any:
        return answer.get(timeout=10.0)


def with_echoes(pipe: Any) -> list[Echo]:
    echoes = []
    for executor in pipe._engine.executors:
        echoes.append(Echo())
        executor._buckets = Buckets(executor.rank, executor.exchange, executor.replicas, echoes[-1])
    return echoes


@pytest.mark.parametrize(("name", "schedule"), [("mlp", "chimera"), ("tied", "1f1b"), ("tied", "zbv")])
def test_every_gradient_is_summed_once(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several buckets, for the limit is a few parameters here; a frozen parameter has no gradient."""
    monkeypatch.setattr(module, "_BUCKET_BYTES", 3000)
    example = MODELS[name](batch=8, dtype=torch.float64)
    next(iter(example.model.parameters())).requires_grad_(False)
    full_batch(example)
    expected = gradients_of(example.model)
    example.model.zero_grad()
    with wrap(example, 2, 4, schedule) as pipe:
        echoes = with_echoes(pipe)
        pipe.step(*example.args, target=example.target, **example.kwargs)
        found = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    for key, gradient in expected.items():
        if gradient is None:
            assert found.get(key) is None
        elif key in found:
            torch.testing.assert_close(found[key], W * gradient, rtol=1e-11, atol=1e-14)
    assert all(len(echo.left) > 1 for echo in echoes)
    trained = sum(parameter.numel() for parameter in example.model.parameters() if parameter.requires_grad)
    sent = sum(size for echo in echoes for _, size in echo.left)
    count = sum(parameter.requires_grad for parameter in example.model.parameters())
    assert trained + count <= sent <= trained + count + W * sum(len(echo.left) for echo in echoes)


def test_buckets_leave_during_the_bubbles() -> None:
    """D=4, chimera: ranks 2 and 3 own the stages that end first, and compute others afterwards."""
    example = MODELS["mlp"](batch=16)
    with wrap(example, 4, 4, "chimera") as pipe:
        echoes, early = with_echoes(pipe), dict.fromkeys((2, 3), False)
        for _ in range(5):  # a bucket waits for another rank's gradients, which may be late on a busy machine
            for echo in echoes:
                echo.left.clear()
            pipe.step(*example.args, target=example.target)
            events = pipe.draw().timelines[-1].events
            for rank in early:
                last = max(event.start for event in events if event.rank == rank and event.action.kind.is_compute)
                early[rank] |= echoes[rank].left[0][0] < last
    assert all(early.values())


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_all_pipelines_have_one_sequence(schedule: str) -> None:
    """It follows from order and cut, whatever arrives first."""
    example = MODELS["tied"](batch=8)
    sequences = []
    for _ in range(2):
        with wrap(example, 4, 4, schedule) as pipe:
            with_echoes(pipe)
            order = pipe._orders.step
            reductions = [executor._buckets.begin(order) for executor in pipe._engine.executors]
            sequences.append([[bucket.names for bucket, _ in reduction._waiting] for reduction in reductions])
    assert sequences[0] == sequences[1]
    names = list(itertools.chain(*itertools.chain(*sequences[0])))
    assert sorted(names) == sorted(name for name, _ in nn.Module.named_parameters(example.model))
