"""What the ranks of tests/process/test_found.py do; every function runs in each process."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.local.toys import chain, data, wrapped
from tests.workers import Caught, caught, owned_gradients, rank, threads

__all__ = [
    "differ", "different_calls", "fail_outside", "freeze_owned", "hooks_on_owned", "plain_gradients", "set_attributes", "twice",
    "two_alive",
]  # fmt: skip


def twice() -> tuple[list[float], list[str], bool, bool]:
    """Wrap, step and close three times, with a process group of the pipeline's own each time."""
    x, y = data(8)
    hook = sys.excepthook
    losses = []
    for _ in range(3):
        with wrapped(chain(4), x, num_stages=2, n_microbatches=4, wait_seconds=20.0) as pipe:
            losses.append(float(pipe.step(x, target=y)))
    return losses, threads(), dist.is_initialized(), sys.excepthook is hook


def two_alive() -> tuple[dict[str, Any], dict[str, Any], bool, bool]:
    """Two pipelines at once; the first, which made the process group, closes before the second has ended."""
    x, y = data(8)
    first = wrapped(chain(4), x, num_stages=2, n_microbatches=4)
    second = wrapped(chain(6), x, num_stages=2, n_microbatches=4, schedule="1f1b")
    first.step(x, target=y)
    first.close()
    alive = dist.is_initialized()
    second.step(x, target=y)
    gradients = owned_gradients(first), owned_gradients(second)
    second.close()
    return *gradients, alive, dist.is_initialized()


def differ(kind: str) -> Caught:
    """Rank 1 differs in something that shapes do not show; a good step must be possible afterwards."""
    x, y = data(8)
    model = chain(4)
    odd = rank() == 1
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        if kind == "values":
            error = caught(lambda: pipe.step(x + odd, target=y))
        elif kind == "loss_scale":
            error = caught(lambda: pipe.step(x, target=y, loss_scale=2.0 if odd else 1.0))
        elif kind == "mode":
            pipe.train(not odd)
            error = caught(lambda: pipe.step(x, target=y))
            pipe.train()
        elif kind == "input gradients":
            error = caught(lambda: pipe.step(x.clone().requires_grad_(), target=y))
        elif odd:
            with pipe.no_sync():
                error = caught(lambda: pipe.step(x, target=y))
        else:
            error = caught(lambda: pipe.step(x, target=y))
        assert torch.isfinite(pipe.step(x, target=y))
    return error


def different_calls() -> Caught:
    """Rank 0 clips while rank 1 steps, which inside gloo would abort the process; a good step must be possible afterwards."""
    x, y = data(8)
    with wrapped(chain(4), x, num_stages=2, n_microbatches=4) as pipe:
        pipe.step(x, target=y)
        error = caught(lambda: pipe.step(x, target=y) if rank() else pipe.clip_grad_norm_(1.0))
        assert torch.isfinite(pipe.step(x, target=y))
    return error


def freeze_owned() -> dict[str, Any]:
    """Freezes the biases among what ``pipe.parameters()`` gives; other ranks' copies of the model do not know."""
    x, y = data(8)
    with wrapped(chain(4), x, num_stages=2, n_microbatches=4) as pipe:
        for name, parameter in pipe.named_parameters():
            parameter.requires_grad_(name.endswith("weight"))
        pipe.step(x, target=y)
        return owned_gradients(pipe)


def hooks_on_owned() -> tuple[dict[str, Any], int]:
    """Clamps gradients by hooks on the owned parameters; the other copy of a stage is on another rank."""
    x, y = data(8)
    calls: list[Any] = []
    with wrapped(chain(4), x, num_stages=2, n_microbatches=4) as pipe:
        for parameter in pipe.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
            parameter.register_post_accumulate_grad_hook(calls.append)
        pipe.step(x, target=y)
        return owned_gradients(pipe), len(calls)


def set_attributes() -> dict[str, Any]:
    """Registers module hooks after wrapping, on every rank alike."""
    x, y = data(8)
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        for layer in model:
            layer.linear.register_forward_hook(lambda _m, _i, output: output * 2)
        pipe.step(x, target=y)
        return owned_gradients(pipe)


def fail_outside() -> tuple[str, str, int]:
    """Rank 1 fails between two steps, in code of its own."""
    x, y = data(8)
    kind, text = "", ""
    try:
        with wrapped(chain(4), x, num_stages=2, n_microbatches=4) as pipe:
            pipe.step(x, target=y)
            if rank() == 1:
                raise KeyError("no such file")
            pipe.step(x, target=y)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, threading.active_count()


def plain_gradients(layers: int = 4) -> dict[str, Any]:
    """What the plain model gives for the same batch."""
    x, y = data(8)
    model = chain(layers)
    F.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
