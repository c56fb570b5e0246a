"""One copy of one stage: its modules, and the micro-batches it has in flight.

The down replica of a stage runs on the user's own module objects, as far as it owns their parameters.  Every other replica (the up
copy, and a stage that reads a parameter owned elsewhere) runs on structural clones whose parameters mirror the owner's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fxchimera.runtime.context import without_autocast
from fxchimera.runtime.message import Payload
from fxchimera.runtime.settings import Snapshot
from fxchimera.runtime.stages.batchnorm import Delta, NormLayer, norm_layers, on_scratch_statistics
from fxchimera.runtime.stages.clone import Follower, clone_modules, set_by_name
from fxchimera.runtime.stages.compiled import StageModule, WholeStage
from fxchimera.runtime.stages.deferral import Deferral
from fxchimera.runtime.stages.division import Division
from fxchimera.runtime.stages.entry import Entry
from fxchimera.runtime.stages.observation import Observation
from fxchimera.runtime.stages.program import Program
from fxchimera.runtime.stages.stagebuffers import StageBuffers, place_of
from fxchimera.runtime.stages.turns import Turns
from fxchimera_passes._torch import run_backward
from fxchimera_passes.capture.state import remembered
from fxchimera_passes.whole import module_at

__all__ = ["Replica"]

Parts = Deferral | Division


@dataclass(slots=True)
class _InFlight:
    """What the backward of a micro-batch needs: where it entered, the differentiable tensors that left, what W shall do."""

    entry: Entry
    sent: list[torch.Tensor]
    parts: Parts | None
    program: Program


class Replica:
    """The copy of stage ``stage`` in pipeline ``pipe``.

    ``parameters`` are all the stage reads, by canonical name; those in ``mirrored`` belong to another replica and are refreshed
    from it.  ``buffers`` likewise; a down replica uses the user's own, where they are on its ``device`` (None: the CPU).  With
    ``deferred`` batch norm learns by step.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        pipe: int,
        stage: int,
        *,
        shares_memory: bool,
        device: torch.device | None = None,
        deferred: bool = False,
    ) -> None:
        self.pipe, self.stage, self.deferred = pipe, stage, deferred
        plan = program.stage(stage)
        names = program.captured.parameters
        held = dict.fromkeys((*plan.parameters, *(plan.owned if pipe == 0 else ())))
        self._aliases = {name: names[name][0] for name in held}
        own = {name: model.get_parameter(alias) for name, alias in self._aliases.items()}
        self.mirrored = tuple(name for name in held if pipe or program.plan.owner[name] != stage)
        self.parameters = {
            name: _mirror(parameter, shares_memory, device or program.captured.device) if name in self.mirrored else parameter
            for name, parameter in own.items()
        }
        self._buffers = StageBuffers(model, device, own=pipe == 0)
        self.buffers = self._buffers.values
        self._mirror_places = [(name, *place_of(model, self._aliases[name])) for name in self.mirrored]
        self.deltas: dict[int, dict[str, Delta]] = {}
        self._model, self._device = model, device
        self._clones = nn.Module() if self.mirrored or pipe else None
        self._memo: dict[int, Any] = {}
        self._follower = Follower(self._memo)
        self._names: set[str] = set()
        self._bound: weakref.WeakKeyDictionary[Program, StageModule] = weakref.WeakKeyDictionary()
        self._norms: tuple[NormLayer, ...] = ()
        self._in_flight: dict[int, _InFlight] = {}
        self._halves: dict[int, Parts] = {}  # of micro-batches whose I is done and whose W is not
        self._allowed: weakref.WeakKeyDictionary[Program, frozenset[int]] = weakref.WeakKeyDictionary()
        self._turns = Turns((), ())
        self._undo: list[Callable[[], None]] = []
        self.learn([program])

    @property
    def norms(self) -> tuple[NormLayer, ...]:
        """The stage's batch-norm layers."""
        return self._norms

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose backward, or its weight part, is still to come."""
        return len(self._in_flight) + len(self._halves)

    def begin(self, microbatches: Sequence[int]) -> None:
        """Begin a step: ``microbatches`` are those whose backwards this replica will run."""
        self._turns = Turns(microbatches, self.parameters.values())

    def learn(self, programs: Iterable[Program]) -> None:
        """Make ready to run these recordings; the stage's buffers and batch-norm layers are then those of all recordings so far.

        Raises:
            FxChimeraError: A module cannot be cloned.
        """
        for program in programs:
            self._buffers.learn(program.stage(self.stage).buffers)
            self._module(program)

    def follow(self, present: Snapshot | None) -> None:
        """Take over what the user has set on the model: modes, attributes, hooks, ``requires_grad``, buffers of another kind."""
        for before, now in self._buffers.follow():
            self._exchange_buffer(before, now)
        self._follower.follow(present)
        for name, holder, key in self._mirror_places:
            wanted = cast(nn.Parameter, holder._parameters[key]).requires_grad
            if self.parameters[name].requires_grad != wanted:
                self.parameters[name].requires_grad_(wanted)

    def forward(
        self,
        microbatch: int,
        program: Program,
        received: Payload,
        inputs: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        *,
        deferred_norms: bool,
        split: bool = False,
    ) -> list[torch.Tensor]:
        """Run the stage and return what it sends on (the last stage: the model's output tensors).

        Args:
            microbatch: Its number; the backward is asked for by it.
            program: The recording that fits the micro-batch.
            received: The values from the stage before, which the stage may overwrite.
            inputs: The input tensors of the micro-batch, by position.
            deferred_norms: Leave batch-norm statistics alone and note the micro-batch's share in ``deltas`` instead.
            split: The backward will come in two parts.
        """
        stage = program.stage(self.stage)
        entry = Entry([_present(tensor) for tensor in received], [value.meta.requires_grad for value in stage.received])
        module = self._module(program)
        own_inputs = [inputs[position] for position in stage.inputs]
        mode = self._mode(program) if split else None
        entered = entry.enter()
        with contextlib.ExitStack() as stack:
            if deferred_norms and self._norms:
                self.deltas[microbatch] = stack.enter_context(on_scratch_statistics(self._norms))
            if mode is not None:
                stack.enter_context(mode)
            outputs = module.forward(*entered, *own_inputs)
        parts: Parts | None
        if isinstance(mode, Observation):
            self._allowed[program] = mode.allowed(outputs, self.parameters.values())
            parts = mode.division(outputs, self._allowed[program])
        else:
            parts = mode
        if torch.is_grad_enabled():
            sent = [tensor for tensor, value in zip(outputs, stage.sent, strict=False) if value.meta.requires_grad]
            self._in_flight[microbatch] = _InFlight(entry, sent, parts, program)
        return list(outputs)

    def backward(self, microbatch: int, gradients: Payload, loss: torch.Tensor | None, seed: float) -> Payload:
        """Run the backward of a micro-batch and return the gradients for the stage before.

        Args:
            microbatch: A micro-batch in flight.
            gradients: For each differentiable value sent, None where nothing flowed back.
            loss: The loss, on the last stage.
            seed: What the loss counts in the batch's, times the user's loss scale.
        """
        state = self._in_flight.pop(microbatch)
        ends = [(root, g) for root, g in zip(state.sent, gradients, strict=True) if g is not None and root.requires_grad]
        if loss is not None and loss.requires_grad:
            ends.append((loss, torch.full_like(loss, seed)))
        roots, seeds = [root for root, _ in ends], [gradient for _, gradient in ends]
        if state.parts is None:
            with self._turns.adding(microbatch), without_autocast():
                if roots:
                    run_backward(roots, seeds)
        else:
            self._input_part(microbatch, state.parts, roots, seeds)
            if mixed := self._turns.early(microbatch):  # a use that the first micro-batch did not show
                self._allowed[state.program] -= mixed
        return state.entry.gradients

    def weight_part(self, microbatch: int) -> None:
        """Run what the backward of a micro-batch, whose forward knew that it would be split, has left to do."""
        parts = self._halves.pop(microbatch, None)
        if parts is not None:
            with self._turns.adding(microbatch), without_autocast():
                parts.weight_part()

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep nothing of parameters that are no longer the model's: neither their memory nor the numbers they went by."""
        for parameter in parameters:
            self._memo.pop(id(parameter), None)

    def forget(self) -> None:
        """Drop everything in flight, after a failure."""
        self._in_flight.clear()
        self._halves.clear()
        self.deltas.clear()

    def remember(self) -> None:
        """Note the Python attributes of the clones, which a forward may change, before a job that may have to be run again."""
        self._undo = [remembered(module_at(self._clones, name)) for name in self._names] if self._clones is not None else []

    def retract(self) -> None:
        """Put the attributes back as they were at :meth:`remember`, or when a clone was made since."""
        for undo in self._undo:
            undo()

    def _input_part(self, microbatch: int, parts: Parts, roots: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
        with self._turns.adding(microbatch, parts.parameters) as later, without_autocast():
            if roots:
                parts.input_part(roots, seeds)
            awaited = {id(parameter) for parameter in parts.parameters} if roots else set()
            for key in later.keys() - awaited:
                del later[key]
        self._halves[microbatch] = parts

    def _mode(self, program: Program) -> Deferral | Observation | None:
        """What the forward of a micro-batch with a split backward runs under; None where nothing can be put off."""
        allowed = self._allowed.get(program)
        if not torch.is_grad_enabled() or isinstance(self._module(program), WholeStage):
            return None
        if allowed is None:
            return Observation()
        return Deferral(allowed) if allowed else None

    def _module(self, program: Program) -> StageModule:
        if self._buffers.copied and self._clones is None:  # the user's own modules hold the original
            self._clones = nn.Module()
            self._names.clear()
            self._bound.clear()
        bound = self._bound.get(program)
        if bound is None:
            graph = program.graphs[self.stage]
            root = self._model
            if self._clones is not None:
                self._extend_clones(graph.modules, graph.attributes, program)
                root = self._clones
            self._names |= set(graph.modules)
            self._norms = norm_layers({name: module_at(root, name) for name in self._names}, deferred=self.deferred)
            bound = self._bound[program] = program.bind(self.stage, root, self._device)
        return bound

    def _exchange_buffer(self, before: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of a buffer in the clones."""
        for module in self._clones.modules() if self._clones is not None else ():
            module._buffers.update({key: tensor for key, value in module._buffers.items() if value is before})
        self._bound.clear()

    def _extend_clones(self, modules: Sequence[str], attributes: Sequence[str], program: Program) -> None:
        assert self._clones is not None
        for name, parameter in self.parameters.items():
            self._memo[id(self._model.get_parameter(self._aliases[name]))] = parameter
        for name, buffer in self.buffers.items():
            self._memo[id(self._model.get_buffer(name))] = buffer
        new = [name for name in modules if name not in self._names]
        clone_modules(self._clones, self._model, new, self._memo)
        for name in new:
            clone = module_at(self._clones, name)
            self._follower.add(module_at(self._model, name), clone)
            self._undo.append(remembered(clone))
        aliases = {alias: name for name in self.parameters for alias in program.captured.parameters[name]}
        for attribute in attributes:
            tensor = self.parameters[aliases[attribute]] if attribute in aliases else self.buffers.get(attribute)
            if tensor is not None:
                set_by_name(self._clones, attribute, tensor)


def _mirror(parameter: nn.Parameter, shares_memory: bool, device: torch.device) -> nn.Parameter:
    """A parameter with its own ``.grad``; on the same device it shares the owner's storage."""
    data = parameter.detach()
    if data.is_meta:  # the first refresh brings values
        data = torch.empty_like(data, device=device)
    elif data.device != device:
        data = data.to(device)
    elif not shares_memory:
        data = data.clone()
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "activations are never absent"
    return tensor
