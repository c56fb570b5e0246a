"""Where a pipeline's forward leaves the plain model's: what each stage sent on, beside the recording run on the plain model.

Only a forward that differs from the plain model's is looked at so, because it takes one more run of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxchimera.runtime.checks.compare import compare_values
from fxchimera.runtime.checks.verdict import Fork, Row
from fxchimera.runtime.microbatch import device_of
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.steps.feed import batch_on
from fxchimera.runtime.steps.job import Job, Result
from fxchimera.runtime.undo import undo_of
from fxchimera_passes.capture.interpret import GraphInterpreter
from fxchimera_passes.capture.state import without_cache

__all__ = ["Crossings", "fork_of", "microbatch_name"]


@dataclass(frozen=True, slots=True)
class Crossings:
    """What stages sent on (the last one: what the model returned), on the CPU, by stage and micro-batch."""

    values: Mapping[tuple[int, int], list[torch.Tensor]]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Crossings:
        """Bring what the ranks of this process have sent to the CPU."""
        everything = {key: found for result in results for key, found in result.crossings.items()}
        return cls({key: [tensor.detach().cpu() for tensor in found] for key, found in everything.items()})


def microbatch_name(world: World, job: Job, pipeline: int, microbatch: int) -> str:
    """A micro-batch by number, with its direction, and its pipeline where there are several."""
    placement = job.order.placement
    text = f"{microbatch} ({placement.pipe_name(placement.pipe_of[microbatch])})"
    return f"{text} of pipeline {pipeline}" if world.grid.width > 1 else text


def fork_of(
    world: World, crossings: Crossings, job: Job, plain: nn.Module | None, outputs: Mapping[int, list[torch.Tensor]] | None
) -> tuple[Fork | None, list[Row]] | None:
    """Collective in each pipeline: find on its rank 0, which has the ``plain`` model and its ``outputs``, where forwards part.

    Returns the first stage that sends on something else, with the distances of the model's outputs; None on the other ranks.
    """
    gathered: list[Crossings] = world.gather_in_pipeline(crossings, "verify()")
    if plain is None or outputs is None:
        return None
    found = {key: values for part in gathered for key, values in part.values.items()}
    last = len(job.order.placement.pipes[0]) - 1
    pipeline = world.grid.pipeline
    names = {m: microbatch_name(world, job, pipeline, m) for m in outputs}
    rows = [compare_values("output", names[m], last, found[last, m], outputs[m]) for m in sorted(outputs)]
    parted: dict[int, list[int]] = {}
    for m in sorted(outputs):
        try:
            wanted = _sent(plain, job, m)
        except Exception:  # then where forwards part stays open; that something differs does not
            break
        for stage in range(last):
            if compare_values("output", "", stage, found[stage, m], wanted[stage]).verdict == "WRONG":
                parted.setdefault(stage, []).append(m)
                break
        else:
            if rows[m].verdict == "WRONG":
                parted.setdefault(last, []).append(m)
    if not parted:
        return None, rows
    first = min(parted)
    return Fork(first, tuple(names[m] for m in parted[first])), rows


class _Noting(GraphInterpreter):
    """Notes the values of some nodes."""

    def __init__(self, *args: Any, wanted: frozenset[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wanted, self.noted = wanted, dict[str, torch.Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and keep a copy of its value: a later one may write into it."""
        value = super().run_node(n)
        if n.name in self.wanted and isinstance(value, torch.Tensor):
            self.noted[n.name] = value.detach().to("cpu", copy=True)
        return value


def _sent(plain: nn.Module, job: Job, microbatch: int) -> list[list[torch.Tensor]]:
    """What each stage but the last would send on in a run of the recording on the plain model, which stays as it was."""
    program = job.programs[microbatch]
    captured = replace(program.captured, model=plain)
    values = [[value.name for value in stage.sent] for stage in program.plan.stages[:-1]]
    device = device_of(job.batch)
    where = next((tensor.device for tensor in [*plain.parameters(), *plain.buffers()]), device)
    batch = job.batch if where == device else batch_on(job.batch, where)
    inputs = [tensor.clone() for tensor in batch.microbatches[microbatch].inputs]
    wanted = frozenset(name for names in values for name in names)
    runner = _Noting(plain, captured.graph, captured.constants, ambient_grad=captured.grad_enabled, wanted=wanted)
    undo = undo_of(plain, plain.buffers())
    try:
        with job.randomness(microbatch), without_cache(plain):
            runner.run(*inputs)
    finally:
        undo()
    return [[runner.noted[name] for name in names] for names in values]
