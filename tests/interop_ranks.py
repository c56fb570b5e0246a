"""What the ranks do in the tests beside ``torch.distributed.pipelining``: the same stages under both runtimes."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

import fxchimera
from fxchimera.interop import original_names, torch_stages
from fxchimera.schedule.order import Order
from tests.local.wrapped import wrap
from tests.models import MODELS, Example
from tests.pipes import N, batch, tagger, token_loss, traced
from tests.workers import owned_gradients, rank

__all__ = ["RATE", "STEPS", "Run", "example_of", "joined", "run_script", "train_both", "train_pipe_both"]

STEPS = 2
RATE = 0.1
Run = dict[str, Any]  # "losses" of the steps where they are known, "gradients" of the steps by name


@contextmanager
def joined() -> Iterator[None]:
    """A group of gloo whose waits end."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def example_of(name: str, n: int) -> Example:
    """In double precision, two rows a micro-batch."""
    return MODELS[name](batch=2 * n, dtype=torch.float64)


def train_by_torch(
    name: str, stages: int, n: int, schedule: str | Order, theirs: str | None = None, points: tuple[str, ...] = ()
) -> Run:
    """Our stages under torch's runtime: under a schedule class of torch's, or under our own order."""
    example = example_of(name, n)
    cut = torch_stages(
        example.model, example_args=example.args, example_kwargs=example.kwargs, num_stages=stages, n_microbatches=n,
        schedule=schedule, split_points=points,
    )  # fmt: skip
    runner = cut.runner(rank(), getattr(pipelining, theirs) if theirs else None, loss_fn=example.loss_fn)
    mine = {id(parameter) for parameter in runner.parameters()}
    named = {key: parameter for key, parameter in example.model.named_parameters() if id(parameter) in mine}

    def step() -> Tensor | None:
        return runner.step(*example.args, target=example.target, **example.kwargs)

    return _trained(step, lambda: {key: _copy(parameter) for key, parameter in named.items()}, named.values())


def train_by_us(name: str, stages: int, n: int, schedule: str | Order, points: tuple[str, ...] = ()) -> Run:
    """The same stages under our runtime."""
    example = example_of(name, n)
    with wrap(example, stages, n, schedule, split_points=points) as pipe:

        def step() -> Tensor:
            return pipe.step(*example.args, target=example.target, **example.kwargs)

        return _trained(step, lambda: owned_gradients(pipe), pipe.parameters())


def train_both(name: str, stages: int, n: int, schedule: str | Order, theirs: str | None = None) -> tuple[Run, Run]:
    """Ours, torch's."""
    with joined():
        return train_by_us(name, stages, n, schedule), train_by_torch(name, stages, n, schedule, theirs)


def train_pipe_both(stages: int) -> tuple[Run, Run]:
    """A ``Pipe`` of torch's under our 1F1B and under torch's, ours first; names are those of the traced model.

    torch 2.13 cannot run a stage but the first that reads the batch, so none does.
    """
    tokens, mask = batch()
    with joined():
        ours = traced(tagger(tied=False, late=False), stages)
        with fxchimera.pipeline(
            ours, example_args=(tokens, mask), loss_fn=token_loss, num_stages=stages, n_microbatches=N, schedule="1f1b"
        ) as pipe:
            first = _trained(
                lambda: pipe.step(tokens, mask, target=tokens), lambda: original_names(owned_gradients(pipe)), pipe.parameters()
            )
        stage = traced(tagger(tied=False, late=False), stages).build_stage(rank(), torch.device("cpu"))
        schedule = pipelining.Schedule1F1B(stage, N, loss_fn=token_loss)

        def step() -> Tensor | None:
            losses: list[Tensor] = []
            schedule.step(*((tokens, mask) if rank() == 0 else ()), target=tokens, losses=losses)
            return torch.stack(losses).mean().detach() if losses else None

        named = dict(stage.submod.named_parameters())
        return first, _trained(step, lambda: {key: _copy(parameter) for key, parameter in named.items()}, named.values())


def _trained(step: Callable[[], Tensor | None], gradients: Callable[[], dict[str, Any]], parameters: Any) -> Run:
    optimizer = torch.optim.SGD(list(parameters), RATE)
    run: Run = {"losses": [], "gradients": []}
    for _ in range(STEPS):
        run["losses"].append(step())
        run["gradients"].append(gradients())
        optimizer.step()
        optimizer.zero_grad()
    return run


def _copy(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


def run_script(folder: str) -> dict[str, list[float]]:
    """Run tutorials/loops/torch_schedules.py as one rank."""
    return runpy.run_path(f"{folder}/torch_schedules.py")["train"]()
