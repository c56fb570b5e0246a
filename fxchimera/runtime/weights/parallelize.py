"""Stages that the user parallelizes further: FSDP2 or tensor parallelism on the other dimensions of a mesh.

    recording -> cut -> for each stage of this rank: parallelize(shell, stage=, device=) -> run, always through the shell

A shell is a module that holds the stage's submodules under the model's own names, as torchtitan's ``parallelize_fn`` expects them,
and changes them in place: parameters become DTensors, hooks gather and scatter.  So what is wrapped must be called as a module:
with ``parallelize`` the elements of the model's outermost lists of modules (its blocks) are recorded as one call each.  Backwards
are whole.  A changed model cannot be recorded again, so the example batch is recorded for training and evaluation before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.batches.warmup import in_mode
from fxchimera.runtime.microbatch import Batch
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.sharded import is_sharded, reshard
from fxchimera.runtime.stages.compiled import StageModule, WholeStage
from fxchimera.runtime.stages.program import Program, Programs
from fxchimera.schedule.placement import Placement
from fxchimera_passes.split import StageGraph, placed
from fxchimera_passes.whole import WHOLE, module_at

__all__ = ["Parallelize", "blocks_of", "parallelize_stages", "refuse_parallelize"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Parallelize(Protocol):
    """What the user passes: changes a stage's modules in place, and returns nothing or the stage itself.

    A stage has only its own part of the model's modules::

        def parallelize(stage_module, *, stage, device):
            for block in getattr(stage_module, "blocks", nn.Module()).children():
                fully_shard(block, mesh=mesh["dp"])          # or parallelize_module(block, mesh["tp"], {...})

    FSDP2 reduces gradients after the backward of every micro-batch.
    """

    def __call__(self, stage_module: nn.Module, *, stage: int, device: torch.device) -> nn.Module | None:
        """Parallelize one stage of this rank."""


class _Shell(nn.Module):
    """Holds a stage's modules under the model's own names; called for every micro-batch, so that its hooks run."""

    def forward(self, run: Callable[..., Any], *values: torch.Tensor) -> Any:
        """Return what the stage sends on."""
        return run(*values)


class _Shelled(WholeStage):
    def __init__(self, shell: nn.Module, stage: int, inner: StageModule) -> None:
        self._shell, self._stage, self._inner = shell, stage, inner

    def forward(self, *values: torch.Tensor) -> Any:
        outputs = self._shell(self._inner.forward, *values)
        if not torch.is_grad_enabled():
            reshard(self._shell)
        if any(is_sharded(output) for output in outputs):
            raise FxChimeraError(
                f"stage {self._stage} returns a DTensor; let its last module return plain tensors, the same on all ranks of the "
                "other dimensions (output_layouts=Replicate(), use_local_output=True)"
            )
        return outputs


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the elements of the model's outermost lists of modules."""
    found: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            inner = f"{name}.{key}" if name else key
            if isinstance(module, _LISTS):
                found.append(inner)
            else:
                visit(child, inner)

    visit(model, "")
    return tuple(found)


def refuse_parallelize(*, compile: bool, profile: bool, recompute: Any) -> None:  # noqa: A002
    """Refuse what does not go with ``parallelize``.

    Raises:
        FxChimeraError: See the message.
    """
    if compile:
        raise FxChimeraError("compile cannot be combined with parallelize; call module.compile() on the modules inside parallelize")
    if profile:
        raise FxChimeraError("profile=True measures stages before they are parallelized; leave it out")
    if recompute not in ("auto", "none"):
        raise FxChimeraError(f"recompute={recompute!r} cannot be combined with parallelize; checkpoint modules inside parallelize")


def parallelize_stages(programs: Programs, batch: Batch, placement: Placement, world: World, parallelize: Parallelize) -> None:
    """Record ``batch`` for every mode, then have the stages of this process changed by the user.

    Raises:
        FxChimeraError: The schedule has two copies of each stage, a parameter is read by two stages, or the callback has left
            behind what cannot run.
    """
    first, model = programs.first, programs.first.captured.model
    _refuse_copies(first, placement)
    modes = dict.fromkeys([(model.training, True), (model.training, False), (False, False)])

    @contextmanager
    def mode(training: bool, grad: bool) -> Iterator[None]:
        with in_mode(model, training), torch.set_grad_enabled(grad):
            yield

    recorded = []
    for training, grad in modes:
        with mode(training, grad), programs.in_advance({}):
            recorded.append(programs.find(batch))
    shells = {}
    for rank in world.ranks:
        for _, stage in placement.replicas(rank):
            shells[stage] = _parallelized(first, stage, world.devices.of(rank) or torch.device("cpu"), parallelize)
    binders = {stage: _binder(shell, stage) for stage, shell in shells.items()}
    programs.seal(batch, [(partial(mode, *which), found) for which, found in zip(modes, recorded, strict=True)], binders)


def _binder(shell: nn.Module, stage: int) -> Callable[[StageModule], StageModule]:
    return lambda inner: _Shelled(shell, stage, inner)


def _refuse_copies(program: Program, placement: Placement) -> None:
    if len(placement.pipes) > 1:
        raise FxChimeraError(
            "parallelize needs a schedule with one copy of each stage: a second copy would be made of modules that have been "
            'parallelized, whose gradients belong to another group. Use schedule="1f1b", "zbv" or "auto"'
        )
    for stage in program.plan.stages:
        for name in stage.parameters:
            if program.plan.owner[name] != stage.index:
                raise FxChimeraError(
                    f"parameter {name!r} is read by the stages {program.plan.owner[name]} and {stage.index}; with parallelize, "
                    "every parameter must be read by one stage: untie it, or choose split_points that keep its uses together"
                )


def _parallelized(program: Program, stage: int, device: torch.device, parallelize: Parallelize) -> nn.Module:
    """Call the user's function on one stage, and check what it has left."""
    model, graph = program.captured.model, program.graphs[stage]
    if WHOLE in graph.modules:
        raise FxChimeraError(f"{type(model).__name__} is recorded as one call, so it has no stages that could be parallelized")
    before = {name: _form(model.get_parameter(name)) for name in program.plan.stages[stage].owned}
    shell = placed(_Shell(), graph, model)
    shell.train(model.training)
    result = parallelize(shell, stage=stage, device=device)
    if result is not None and result is not shell:
        raise FxChimeraError(
            f"parallelize returned a {type(result).__name__} for stage {stage}; change the stage in place, as fully_shard, "
            "parallelize_module and module.compile() do, and return it or None"
        )
    _check_attributes(shell, model, graph, stage)
    _check_modules(shell, model, graph, stage)
    for name, (shape, dtype) in before.items():
        new = _parameter(model, name)
        if new is None or _form(new) != (shape, dtype):
            found = "is gone" if new is None else f"has shape {tuple(new.shape)} and {new.dtype}"
            raise FxChimeraError(
                f"parameter {name!r}, of shape {shape} and {dtype}, {found} after parallelize of stage {stage}; parameters must "
                "keep their names, global shapes and dtypes"
            )
    return shell


def _check_attributes(shell: nn.Module, model: nn.Module, graph: StageGraph, stage: int) -> None:
    for name in graph.attributes:
        path, _, key = name.rpartition(".")
        inside = any(name.startswith(f"{module}.") for module in graph.modules)
        if not inside and getattr(shell.get_submodule(path), key) is not getattr(model.get_submodule(path), key):
            raise FxChimeraError(
                f"parallelize changed {name!r} of stage {stage}, which the model's own forward reads outside any submodule; leave "
                "it out (fully_shard(..., ignored_params=...)), or move it into a submodule"
            )


def _check_modules(shell: nn.Module, model: nn.Module, graph: StageGraph, stage: int) -> None:
    for name in graph.modules:
        if module_at(shell, name) is not module_at(model, name):
            raise FxChimeraError(
                f"parallelize put another module in the place of {name!r} in stage {stage}; change it in place, or let the model "
                "have the other module before it is wrapped"
            )


def _form(parameter: nn.Parameter) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(parameter.shape), parameter.dtype


def _parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None
