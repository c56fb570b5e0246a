"""The plain model, run micro-batch by micro-batch in one process: what a pipeline's step is compared with, bit for bit.

Two things are borrowed from the pipeline, because equality to the last bit needs them: the keyed randomness of each micro-batch,
and the association of the gradient sums (see ``gradients``).  The second matters for tied parameters only: while the plain model
runs, each stage's use of such a parameter reads an alias with a ``.grad`` of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxchimera.runtime.batches.loss import LossFn, loss_of, total_loss
from fxchimera.runtime.batches.settling import MOST_RUNS, known_paths, unsettled
from fxchimera.runtime.context import casts_kept, without_autocast
from fxchimera.runtime.microbatch import Batch, MicroBatch
from fxchimera.runtime.stages.gradients import GradientSum, HeldHooks, hooked, own_gradients, take_gradients
from fxchimera.runtime.stages.program import Program, Programs
from fxchimera.runtime.undo import undo_of
from fxchimera.schedule.placement import Placement
from fxchimera_passes.assumed import collecting
from fxchimera_passes.capture.interpret import interpret
from fxchimera_passes.capture.state import without_cache
from fxchimera_passes.captured import info
from fxchimera_passes.keyed import keyed_model, microbatch_randomness
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.whole import module_at

__all__ = ["Reference", "run_reference", "true_programs"]


@dataclass(frozen=True, slots=True)
class Reference:
    """The batch's loss, the gradient of every parameter by canonical name (None where none flowed), and each micro-batch's loss."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    losses: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    batch: Batch
    programs: Sequence[Program]
    weights: tuple[float, ...]
    loss_fn: LossFn | None
    loss_scale: float
    seed: int
    step: int
    watch: Callable[[int, Any], None] | None


def run_reference(
    model: nn.Module,
    batch: Batch,
    programs: Sequence[Program],
    placement: Placement,
    *,
    weights: tuple[float, ...],
    loss_fn: LossFn | None,
    loss_scale: float = 1.0,
    seed: int = 0,
    step: int = 0,
    watch: Callable[[int, Any], None] | None = None,
) -> Reference:
    """Run forward and backward of every micro-batch on ``model`` and sum the gradients as the pipeline does.

    ``model`` ends with the gradients it had; its buffers are updated as in a plain loop over the micro-batches, ascending.
    ``watch`` is called with the number of each micro-batch and what the model returned for it.
    One case is equal up to rounding only: a tied parameter that an opened module reads once and several stages use.
    """
    task = _Task(
        batch=batch, programs=programs, weights=weights, loss_fn=loss_fn, loss_scale=loss_scale, seed=seed, step=step, watch=watch
    )
    names = {name: model.get_parameter(aliases[0]) for name, aliases in programs[0].captured.parameters.items()}
    earlier = take_gradients(names)
    sums = {name: GradientSum() for name in names}
    losses: dict[int, torch.Tensor] = {}
    hooks = [HeldHooks(parameter) for parameter in names.values()]
    try:
        torch.clear_autocast_cache()
        # as in the recording, where a cache of the model's returns keys and values in another layout, which rounds otherwise
        with casts_kept(), without_cache(model):
            for pipe in range(len(placement.pipes)):
                uses = _Uses(model, [program.plan for program in programs], names)
                for microbatch in placement.microbatches(pipe):
                    with uses.installed(programs[microbatch]):
                        losses[microbatch] = _one(model, microbatch, task)
                    uses.own_gradients()
                uses.collect(pipe, sums)
    finally:
        torch.clear_autocast_cache()
        for held in hooks:
            held.give_back()
        for name, parameter in names.items():
            parameter.grad = earlier[name]
    dtype = next(iter(losses.values())).dtype
    totals = {name: total.total() for name, total in sums.items()}
    gradients = {name: None if total is None else hooked(names[name], total) for name, total in totals.items()}
    return Reference(total_loss(losses, weights, dtype), gradients, tuple(losses[index] for index in sorted(losses)))


def true_programs(programs: Programs, batch: Batch, *, seed: int, step: int) -> tuple[Program, ...]:
    """Find the programs that assume what the model answers with its present parameters; the model stays as it is.

    Raises:
        FxChimeraError: There are too many answers, or they differ from run to run.
    """
    found = programs.find(batch, seed=seed, step=step)
    model = found[0].captured.model
    undo_all = undo_of(model, model.buffers())
    try:
        for index, microbatch in enumerate(batch.microbatches):
            for _ in range(MOST_RUNS):
                if not found[index].captured.assumed:
                    break
                undo = undo_of(model, model.buffers())
                with microbatch_randomness(seed, step, microbatch.number), collecting() as answers, without_cache(model):
                    try:
                        interpret(found[index].captured, [tensor.clone() for tensor in microbatch.inputs])
                    except Exception:  # on a wrong path that does not matter
                        if not answers:
                            raise
                if not answers:
                    break
                undo()
                first = min(answers)
                latest = found[index].captured.assumed[first]
                paths = known_paths(found, {index: (first, answers[first])})
                found = programs.find(batch, seed=seed, step=step, paths=paths)
            else:
                raise unsettled(latest)
    finally:
        undo_all()
    return found


def _one(model: nn.Module, index: int, task: _Task) -> torch.Tensor:
    microbatch: MicroBatch = task.batch.microbatches[index]
    captured = task.programs[index].captured
    keys = [key for node in captured.graph.nodes for key in info(node).random]
    keys += captured.host_keys
    with microbatch_randomness(task.seed, task.step, microbatch.number):
        with keyed_model(model, keys):
            output = model(*microbatch.args, **microbatch.kwargs)
        if task.watch is not None:
            task.watch(index, output)
        loss = loss_of(output, microbatch.target, task.loss_fn)
        if task.weights[index]:
            with without_autocast():
                torch.autograd.backward([loss], [torch.full_like(loss, task.weights[index] * task.loss_scale)])
    return loss.detach()


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place in the model that holds a tied parameter."""

    holder: nn.Module
    attribute: str
    name: str

    def set(self, parameter: nn.Parameter) -> None:
        self.holder._parameters[self.attribute] = parameter


@dataclass(slots=True)
class _Leaf:
    """A leaf module that reads tied parameters: where they are, and the stage of each of its calls in one forward."""

    slots: list[_Slot] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    calls: int = 0


class _Uses:
    """Gives every stage that reads a tied parameter an alias of its own while the plain model runs."""

    def __init__(self, model: nn.Module, plans: Sequence[StagePlan], names: dict[str, nn.Parameter]) -> None:
        self._model, self._names = model, names
        found: dict[str, set[int]] = {}
        for stage in (stage for plan in plans for stage in plan.stages):
            for name in stage.parameters:
                found.setdefault(name, set()).add(stage.index)
        readers = {name: sorted(stages) for name, stages in found.items()}
        self._first_stage = {name: stages[0] for name, stages in readers.items()}
        self._alias = {
            (name, stage): nn.Parameter(names[name].detach(), requires_grad=names[name].requires_grad)
            for name, stages in readers.items()
            if len(stages) > 1
            for stage in stages
        }
        self._tied = {name for name, _ in self._alias}

    @contextlib.contextmanager
    def installed(self, program: Program) -> Iterator[None]:
        """Put the aliases in place for one forward and backward of ``program``'s signature."""
        leaves, resting = self._find(program) if self._tied else ({}, [])

        def rest() -> None:
            for slot, stage in resting:
                slot.set(self._alias[slot.name, stage])

        def enter(module: nn.Module, _args: object) -> None:
            leaf = leaves[id(module)]
            for slot in leaf.slots:
                stage = leaf.stages[min(leaf.calls, len(leaf.stages) - 1)]  # a call without effect is not in the recording
                slot.set(self._alias[slot.name, stage])
            leaf.calls += 1

        def leave(module: nn.Module, _args: object, _output: object) -> None:
            for slot in leaves[id(module)].slots:
                slot.set(self._names[slot.name])
            rest()

        handles: list[RemovableHandle] = []
        try:
            rest()
            for module in self._model.modules():
                if id(module) in leaves:
                    handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
            yield
        finally:
            for handle in handles:
                handle.remove()
            for slot in [slot for leaf in leaves.values() for slot in leaf.slots] + [slot for slot, _ in resting]:
                slot.set(self._names[slot.name])

    def own_gradients(self) -> None:
        """Let nothing else look at the gradients, before the next micro-batch adds to them."""
        own_gradients([*self._alias.values(), *self._names.values()])

    def collect(self, pipe: int, sums: dict[str, GradientSum]) -> None:
        """Move the gradients of all micro-batches of a pipe into ``sums``."""
        for (name, stage), alias in self._alias.items():
            sums[name].add((pipe, stage), alias.grad)
        for name, parameter in self._names.items():  # a tied one: uses in several stages that could not be told apart
            sums[name].add((pipe, self._first_stage.get(name, 0)), parameter.grad)
            parameter.grad = None

    def _find(self, program: Program) -> tuple[dict[int, _Leaf], list[tuple[_Slot, int]]]:
        """Find the leaf modules that read tied parameters, and what opened frames read themselves, with their stages."""
        canonical = {alias: name for name, aliases in program.captured.parameters.items() for alias in aliases}
        stage_of = {name: stage.index for stage in program.plan.stages for name in stage.nodes}
        leaves: dict[int, _Leaf] = {}
        resting: list[tuple[_Slot, int]] = []
        for node in program.captured.graph.nodes:
            target = str(node.target)
            if node.op == "call_module":
                self._add_call(leaves, target, stage_of[node.name], canonical)
            elif node.op == "get_attr" and canonical.get(target) in self._tied:
                stages = {stage_of[user.name] for user in node.users if user.name in stage_of}
                if len(stages) == 1:  # the plain model may read it under any of its names
                    aliases = program.captured.parameters[canonical[target]]
                    resting += [(self._slot(alias, canonical), min(stages)) for alias in aliases]
        return leaves, resting

    def _add_call(self, leaves: dict[int, _Leaf], target: str, stage: int, canonical: dict[str, str]) -> None:
        module = module_at(self._model, target)
        tied = [f"{target}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        tied = [name for name in tied if canonical.get(name) in self._tied]
        if not tied:
            return
        leaf = leaves.setdefault(id(module), _Leaf())
        leaf.stages.append(stage)
        if not leaf.slots:
            leaf.slots = [self._slot(name, canonical) for name in tied]

    def _slot(self, full_name: str, canonical: dict[str, str]) -> _Slot:
        holder, _, attribute = full_name.rpartition(".")
        return _Slot(self._model.get_submodule(holder), attribute, canonical[full_name])
