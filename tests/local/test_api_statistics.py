"""Batch norm's statistics, evaluation between steps, and torch's random state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.local.wrapped import step, wrap
from tests.models import MODELS
from tests.parity import assert_close, assert_same_tensors, gradients_of, micro_batch_loop, split

CHIMERA_AND_1F1B = pytest.mark.parametrize("schedule", ["chimera", "1f1b"])


@pytest.mark.parametrize("stages", [2, 4])
def test_batch_norm_statistics_equal_the_plain_loops(stages: int) -> None:
    """P15: uneven rows, three steps, both directions."""
    example, reference = (MODELS["resnet"](dtype=torch.float64, batch=14) for _ in range(2))
    with wrap(example, stages, 4) as pipe:
        for _ in range(3):
            example.model.zero_grad()
            reference.model.zero_grad()
            assert_close(step(pipe, example), micro_batch_loop(reference, 4), 1e-12)
        evaluated = pipe.evaluate(*example.args, target=example.target)
    state, expected = example.model.state_dict(), reference.model.state_dict()
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-14)
    assert int(state["stem.1.num_batches_tracked"]) == 12
    reference.model.eval()
    torch.testing.assert_close(evaluated, reference.loss(reference.model(*reference.args)).detach(), rtol=1e-12, atol=0.0)


@CHIMERA_AND_1F1B
def test_a_forward_only_call_in_training_mode_updates_statistics_too(schedule: str) -> None:
    """As the plain model's forward does, micro-batch by micro-batch: statistics can be calibrated so."""
    example, reference = (MODELS["resnet"](dtype=torch.float64, batch=9) for _ in range(2))
    with wrap(example, 4, 4, schedule) as pipe, torch.no_grad():
        for _ in range(2):
            pipe(*example.args)
            for piece in split(reference, 4):
                reference.model(*piece.args)
    torch.testing.assert_close(example.model.state_dict(), reference.model.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("order", ["TTE", "ETTEO", "TEOT"])
def test_evaluation_anywhere_changes_nothing(order: str) -> None:
    """P18: parameters, gradients, buffers and torch's random state keep their bits over an evaluation, of any batch size."""
    example = MODELS["resnet"](batch=9, dropout=0.3)
    other = MODELS["resnet"](batch=5, seed=4)
    trained = []
    with wrap(example, 2, 4) as pipe:
        for letter in order:
            if letter == "T":
                trained.append(step(pipe, example))
                continue
            batch = example if letter == "E" else other
            before = _everything(example.model)
            pipe.evaluate(*batch.args, target=batch.target)
            pipe.eval()
            with torch.no_grad():
                pipe(*batch.args)
            pipe.train()
            assert_same_tensors(_everything(example.model), before)
            assert all(module.training for module in example.model.modules())
    again = MODELS["resnet"](batch=9, dropout=0.3)
    with wrap(again, 2, 4) as pipe:
        for outcome in trained[:-1]:
            assert torch.equal(step(pipe, again).loss, outcome.loss)
        last = step(pipe, again)
    assert torch.equal(last.loss, trained[-1].loss)
    assert_same_tensors(last.gradients, trained[-1].gradients)


def test_training_leaves_torchs_random_state_alone() -> None:
    example = MODELS["mlp"](batch=8, dropout=0.3)
    with wrap(example, 4, 4) as pipe:
        before = torch.get_rng_state()
        step(pipe, example)
        assert torch.equal(torch.get_rng_state(), before)


def _everything(model: nn.Module) -> dict[str, Any]:
    state = {f"state {key}": value.clone() for key, value in model.state_dict().items()}
    gradients = {f"gradient {key}": value for key, value in gradients_of(model).items()}
    return {**state, **gradients, "random": torch.get_rng_state()}
