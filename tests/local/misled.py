"""Pipelines in which one thing is wrong: what ``verify`` has to find, and where it is.

Each function plants one thing in a pipeline of four stages with two copies of each; blocks 2s and 2s + 1 are stage s, and the up
pipe has the micro-batches 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxchimera
from fxchimera import Pipeline
from fxchimera.runtime.stages.batchnorm import NormLayer
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps import attempts, executor
from fxchimera.runtime.steps.engine import Engine
from fxchimera.runtime.steps.exchange import Exchange
from fxchimera_passes.keyed import microbatch_randomness

__all__ = ["WRONG", "Wrong", "batch", "net", "wrapped"]

WIDTH, ROWS = 6, 8


class Block(nn.Module):
    """Reads the mask, drops at random, and learns statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask * self.drop(torch.tanh(self.norm(self.linear(x))))


class Net(nn.Module):
    """Eight blocks, the last of which shares its weight with the first, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.blocks[7].linear.weight = self.blocks[0].linear.weight
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net().double().train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 5 > 0).double(), y


@contextmanager
def wrapped(schedule: str = "chimera") -> Iterator[Pipeline]:
    x, mask, _ = batch()
    with fxchimera.pipeline(
        net(), example_args=(x, mask), loss_fn=nn.functional.mse_loss, num_stages=4, n_microbatches=4, schedule=schedule, seed=2,
        split_points=["blocks.2", "blocks.4", "blocks.6"],
    ) as pipe:  # fmt: skip
        yield pipe


Plant = Callable[[pytest.MonkeyPatch, Pipeline], None]


@dataclass(frozen=True)
class Wrong:
    """``plant`` makes ``stage`` the first that differs; ``wrong`` are rows that have to be WRONG, ``alone`` if no others may."""

    plant: Plant
    stage: int
    wrong: tuple[str, ...]
    said: str
    alone: bool = False


def gradient(change: Callable[[dict[str, nn.Parameter]], None]) -> Plant:
    """Change what the owners get."""

    def plant(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
        commit = Engine.commit

        def changed(self: Engine, *args: Any, **kwargs: Any) -> None:
            commit(self, *args, **kwargs)
            change(self.owned)

        patch.setattr(Engine, "commit", changed)

    return plant


def scaled(owned: dict[str, nn.Parameter]) -> None:
    owned["blocks.3.norm.bias"].grad.mul_(1 + 1e-6)


def missing(owned: dict[str, nn.Parameter]) -> None:
    owned["blocks.5.norm.weight"].grad = None


def extra(owned: dict[str, nn.Parameter]) -> None:
    owned["idle"].grad = torch.zeros(2, dtype=torch.float64)


def not_finite(owned: dict[str, nn.Parameter]) -> None:
    owned["blocks.2.linear.weight"].grad[0, 0] = float("nan")


def forward(change: Callable[..., Any]) -> Plant:
    """Change how a replica runs its forward: ``change(replica, microbatch, program, received, inputs, run)``."""

    def plant(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
        original = Replica.forward

        def changed(self: Replica, microbatch: int, program: Any, received: Any, inputs: Any, **options: Any) -> Any:
            def run(received: Any, inputs: Any) -> Any:
                return original(self, microbatch, program, received, inputs, **options)

            return change(self, microbatch, received, inputs, run)

        patch.setattr(Replica, "forward", changed)

    return plant


def other_mask(replica: Replica, microbatch: int, received: Any, inputs: Any, run: Any) -> Any:
    inputs = dict(enumerate(inputs)) if not isinstance(inputs, dict) else dict(inputs)
    return run(received, {**inputs, 1: 1 - inputs[1]} if replica.stage == 2 else inputs)


def other_crossing(replica: Replica, microbatch: int, received: Any, inputs: Any, run: Any) -> Any:
    if replica.stage == 1 and microbatch == 2:
        received = [received[0] * (1 + 1e-9), *received[1:]]
    return run(received, inputs)


def other_draws(replica: Replica, microbatch: int, received: Any, inputs: Any, run: Any) -> Any:
    if replica.stage != 1 or microbatch != 0:
        return run(received, inputs)
    with microbatch_randomness(2, 0, 1):
        return run(received, inputs)


def other_output(replica: Replica, microbatch: int, received: Any, inputs: Any, run: Any) -> Any:
    outputs = run(received, inputs)
    return [output + 1e-6 for output in outputs] if replica.stage == 3 and microbatch == 3 else outputs


def other_loss(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    loss_of = executor.loss_of
    patch.setattr(executor, "loss_of", lambda *args: loss_of(*args) * 1.001)


def other_total(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    gather = attempts.gather_losses

    def gathered(*args: Any) -> Any:
        losses = gather(*args)
        return replace(losses, weights=tuple(weight * 1.01 for weight in losses.weights))

    patch.setattr(attempts, "gather_losses", gathered)


def other_statistics(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    apply = NormLayer.apply
    norm = pipe._model.get_submodule("blocks.4.norm")
    patch.setattr(NormLayer, "apply", lambda self, deltas: None if self.module is norm else apply(self, deltas))


def drifted(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    """The copy of stage 2 in the up pipe is not refreshed any more."""
    refresh = Exchange.refresh
    patch.setattr(Exchange, "refresh", lambda self, stage, *args: None if stage == 2 else refresh(self, stage, *args))
    copy = next(e.replicas[1, 2] for e in pipe._engine.executors if (1, 2) in e.replicas).parameters["blocks.5.norm.bias"]
    copy.data = copy.detach() + 1e-3


def lost_gradients(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    add = Exchange.add_gradients
    patch.setattr(Exchange, "add_gradients", lambda self, stage, *args: None if stage == 1 else add(self, stage, *args))


def other_backward(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    """Stage 2 sends back too much: what its own parameters get is right."""
    backward = Replica.backward

    def changed(self: Replica, *args: Any) -> Any:
        found = backward(self, *args)
        return [g if g is None or self.stage != 2 else g * 1.5 for g in found]

    patch.setattr(Replica, "backward", changed)


# not of the linears' biases, whose gradients batch norm makes zero
_OF_STAGE_1 = tuple(f"blocks.{block}.{name}" for block in (2, 3) for name in ("linear.weight", "norm.weight", "norm.bias"))
_BACK = "in the order of the backward"
WRONG = {
    "a gradient": Wrong(gradient(scaled), 1, ("blocks.3.norm.bias",), _BACK, alone=True),
    "a missing gradient": Wrong(gradient(missing), 2, ("blocks.5.norm.weight",), "no gradient in the pipeline", alone=True),
    "a gradient too many": Wrong(gradient(extra), 3, ("idle",), "no gradient in the plain model", alone=True),
    "a nan": Wrong(gradient(not_finite), 1, ("blocks.2.linear.weight",), "not finite in the pipeline", alone=True),
    "lost gradients of a copy": Wrong(lost_gradients, 1, _OF_STAGE_1, _BACK),
    "a backward": Wrong(other_backward, 1, (*_OF_STAGE_1, "blocks.1.norm.bias", "blocks.0.linear.weight"), _BACK),
    "a mask": Wrong(forward(other_mask), 2, ("0 (down)", "3 (up)"), "in its forward of micro-batch 0 (down), 1 (down), 2 (up)"),
    "a crossing": Wrong(forward(other_crossing), 1, ("2 (up)",), "1, in its forward of micro-batch 2 (up)\n"),
    "random draws": Wrong(forward(other_draws), 1, ("0 (down)",), "1, in its forward of micro-batch 0 (down)\n"),
    "an output": Wrong(forward(other_output), 3, ("3 (up)",), "3, in its forward of micro-batch 3 (up)\n"),
    "a loss": Wrong(other_loss, 3, ("the loss of micro-batch 0 (down)", "blocks.2.linear.weight"), "3, in the loss of micro-batch"),
    "the batch's loss": Wrong(other_total, 3, ("the batch's loss",), "3, in the batch's loss", alone=True),
    "statistics": Wrong(
        other_statistics, 2, tuple(f"blocks.4.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "2, in a buffer; loss and gradients agree", alone=True,
    ),
    "a copy": Wrong(drifted, 2, ("2 (up)", "3 (up)"), "stage 2 (up)  blocks.5.norm.bias: the copy's values are not the owner's"),
}  # fmt: skip
