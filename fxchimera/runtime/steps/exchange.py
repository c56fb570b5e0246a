"""What the replicas of a stage tell each other: parameters from owner to mirror, gradients from mirror to owner.

The protocol is unconditional, because users step, accumulate, evaluate and swap weights irregularly: every step and every
forward-only call begins with a refresh, every step ends with the gradients at their owner.  A mirror's gradients belong to the
step: they are taken off the mirror as soon as its last backward is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fxchimera.runtime.message import Payload
from fxchimera.runtime.stages.batchnorm import Delta
from fxchimera.runtime.stages.gradients import GradientSum, HeldHooks, add_to_grad, hooked, take_gradients
from fxchimera.runtime.stages.replica import Replica
from fxchimera.schedule.placement import Placement
from fxchimera_passes.captured import TensorMeta
from fxchimera_passes.plan import StagePlan

__all__ = ["Exchange", "Statistics"]

_CPU = torch.device("cpu")
_Moment = tuple[int, int]  # (step, micro-batch)
Statistics = dict[tuple[int, int], dict[_Moment, dict[str, Delta]]]  # by (pipe, stage), moment, and layer


@dataclass(frozen=True, slots=True)
class _Link:
    """One edge as seen from either end: the names that travel, and whether the stage's buffers and statistics do."""

    use: tuple[int, int]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


class Exchange:
    """The replicas of one rank and the links to the owners and mirrors of their parameters."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        plan: StagePlan,
        replicas: Mapping[tuple[int, int], Replica],
        *,
        first_microbatch: int = 0,
    ) -> None:
        self._rank = rank
        self._first = first_microbatch  # of this pipeline, among those of all pipelines
        self._placement = placement
        self._plan = plan
        self._replicas = replicas
        self._sums: dict[str, GradientSum] = {}
        self._earlier: dict[str, torch.Tensor | None] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._summed: dict[str, torch.Tensor | None] = {}
        self._remembers = False
        self._hooks: list[HeldHooks] = []
        self._pending: dict[tuple[int, int], dict[str, GradientSum]] = {}
        self._deltas: Statistics = {}
        self._before: tuple[dict[str, GradientSum], dict[tuple[int, int], dict[str, GradientSum]], Statistics] = ({}, {}, {})
        self.owned: dict[str, nn.Parameter] = {}
        for (pipe, stage), replica in sorted(replicas.items()):
            if pipe == 0:
                self.owned |= {n: p for n, p in replica.parameters.items() if plan.owner[n] == stage}

    # ------------------------------------------------------------------ the step's begin and end

    def begin(self) -> None:
        """Set aside the gradients that earlier steps left on the owned parameters, and the user's hooks on these."""
        self._hooks = [HeldHooks(parameter) for parameter in self.owned.values()]
        self._earlier = take_gradients(self.owned)

    def close_replica(self, replica: Replica, step: int) -> None:
        """Take the gradients and statistics off a replica whose last backward of the step is done."""
        use = (replica.pipe, replica.stage)
        for name, gradient in take_gradients(replica.parameters).items():
            owner = self._placement.pipes[0][self._plan.owner[name]]
            sums = self._sums if owner == self._rank else self._pending.setdefault(use, {})
            sums.setdefault(name, GradientSum()).add(use, gradient)
        self.note_statistics(replica, step)

    def note_statistics(self, replica: Replica, step: int) -> None:
        """Take the batch-norm statistics off a replica that has seen its micro-batches."""
        moments = {(step, self._first + m): deltas for m, deltas in replica.deltas.items() if deltas}
        if moments:
            self._deltas.setdefault((replica.pipe, replica.stage), {}).update(moments)
        replica.deltas.clear()

    def total(self, name: str) -> torch.Tensor | None:
        """Sum what the replicas of this pipeline contribute to an owned gradient, in memory that may be written, once."""
        sums = self._sums.get(name)
        total = sums.total() if sums is not None and not self._remembers else None
        if sums is not None and self._remembers:  # the job may be undone, and what steps before it have left is needed again
            total = GradientSum({use: part.clone() for use, part in sums.parts.items()}).total()
        return total

    def settle(self, sums: Mapping[str, torch.Tensor | None]) -> None:
        """Take the sums over all pipelines."""
        self._summed |= sums

    def conclude(self, *, hooks: bool = True) -> None:
        """Sum the gradients of all replicas; the user's hooks on a parameter are called with its sum."""
        names = dict.fromkeys([*self._sums, *self._summed])
        sums = {name: self._summed[name] if name in self._summed else self._sums[name].total() for name in names}
        totals = {name: total for name, total in sums.items() if total is not None}
        self._give_hooks_back()
        with torch.no_grad():  # as hooks are called in a backward
            self._totals = {name: hooked(self.owned[name], total) if hooks else total for name, total in totals.items()}

    def commit(self, *, synchronised: bool) -> tuple[str, ...]:
        """Put gradients back on the owned parameters: the sums, if ``synchronised``, added to what was there.

        Returns the names of the parameters that got one.
        """
        self._give_hooks_back()
        totals, self._totals, self._before = self._totals, {}, ({}, {}, {})
        self._summed, self._remembers = {}, False
        for name, parameter in self.owned.items():
            add_to_grad(parameter, self._earlier.get(name), totals.get(name))
        self._earlier = {}
        if synchronised:
            self._sums.clear()
            self._pending.clear()
            self._apply_statistics()
        return tuple(totals)

    def take_statistics(self) -> Statistics:
        """Remove and return the statistics noted on this rank and not yet applied, on the CPU."""
        taken, self._deltas = self._deltas, {}
        return {
            use: {moment: {name: delta.on(_CPU) for name, delta in deltas.items()} for moment, deltas in moments.items()}
            for use, moments in taken.items()
        }

    def add_statistics(self, statistics: Statistics) -> None:
        """Note what :meth:`take_statistics` removed, with that of other ranks, to be applied at the end of the step."""
        self._deltas = statistics

    def apply_statistics(self, statistics: Statistics) -> None:
        """Update the owned batch-norm layers with what all ranks have noted."""
        self._deltas = statistics
        self._apply_statistics()
        self._deltas = {}

    def abandon(self) -> None:
        """After a failure: give the owned parameters back the gradients they had, and drop the step's."""
        self._give_hooks_back()
        for name, earlier in self._earlier.items():
            self.owned[name].grad = earlier
        self._earlier, self._totals, self._summed = {}, {}, {}
        self._sums.clear()
        self._pending.clear()
        self._deltas.clear()
        for replica in self._replicas.values():
            replica.forget()
            take_gradients({name: replica.parameters[name] for name in replica.mirrored})

    def remember(self) -> None:
        """Before a job that may have to be run again: note what steps without the exchange have left here."""
        pending = {use: {name: sums.copy() for name, sums in names.items()} for use, names in self._pending.items()}
        deltas = {use: dict(moments) for use, moments in self._deltas.items()}
        self._before = ({name: sums.copy() for name, sums in self._sums.items()}, pending, deltas)
        self._remembers = True

    def retract(self) -> None:
        """Undo a job since :meth:`remember`, which every rank has come to the end of."""
        self.abandon()
        self._sums, self._pending, self._deltas = self._before
        for replica in self._replicas.values():
            replica.retract()

    def _give_hooks_back(self) -> None:
        for held in self._hooks:
            held.give_back()
        self._hooks = []

    # ------------------------------------------------------------------ messages

    def names_from(self, stage: int, mirror: int) -> tuple[str, ...]:
        """The owned parameters of which a mirror sends gradients."""
        return self._link(stage, mirror, self._rank).parameters

    def refresh_metas(self, stage: int, mirror: int, owner: int) -> tuple[TensorMeta, ...]:
        """Meta data of a refresh along an edge."""
        link = self._link(stage, mirror, owner)
        return tuple(self._meta(name) for name in (*link.parameters, *link.buffers))

    def refresh_payload(self, stage: int, mirror: int) -> Payload:
        """What this rank, as owner, sends to a mirror."""
        link = self._link(stage, mirror, self._rank)
        buffers = self._replicas[0, stage].buffers if link.buffers else {}
        return [*(self.owned[name].detach() for name in link.parameters), *(buffers[name] for name in link.buffers)]

    def refresh(self, stage: int, owner: int, payload: Payload) -> None:
        """Take over the owner's values in this rank's mirror."""
        link = self._link(stage, self._rank, owner)
        replica = self._replicas[link.use]
        with torch.no_grad():
            for name, value in zip((*link.parameters, *link.buffers), payload, strict=True):
                assert value is not None
                if name in replica.buffers and name not in link.parameters:
                    replica.buffers[name].copy_(value)
                elif replica.parameters[name].data_ptr() != value.data_ptr():
                    replica.parameters[name].data = value  # the owner's own memory, or what the message came in

    def alias_local(self) -> None:
        """Refresh the mirrors whose owner is on this very rank."""
        for (pipe, stage), replica in self._replicas.items():
            if pipe and (0, stage) in self._replicas:
                for name, buffer in replica.buffers.items():
                    buffer.copy_(self._replicas[0, stage].buffers[name])
            for name in replica.mirrored:
                if name in self.owned and replica.parameters[name].data_ptr() != self.owned[name].data_ptr():
                    replica.parameters[name].data = self.owned[name].detach()

    def gradient_metas(self, stage: int, mirror: int, owner: int, moments: Sequence[_Moment]) -> tuple[TensorMeta, ...]:
        """Meta data of the gradients along an edge; ``moments`` are the micro-batches whose statistics travel too."""
        link = self._link(stage, mirror, owner)
        metas = [self._meta(name) for name in self._trainable(link)]
        if link.buffers:
            for layer in self._replicas_of(stage)[0].norms:
                statistic = layer.module.running_mean
                if layer.writes and statistic is not None:
                    one = TensorMeta(tuple(statistic.shape), tuple(statistic.stride()), statistic.dtype, False)
                    metas += [one, one, TensorMeta((), (), torch.int64, False)] * len(moments)
        return tuple(metas)

    def gradient_payload(self, stage: int, owner: int, moments: Sequence[_Moment]) -> Payload:
        """What this rank, as mirror, sends to an owner."""
        link = self._link(stage, self._rank, owner)
        pending = self._pending.get(link.use, {})
        payload: Payload = [pending[name].total() if name in pending else None for name in self._trainable(link)]
        if link.buffers:
            for layer in self._replicas[link.use].norms:
                for moment in moments if layer.writes else ():
                    delta = self._deltas.get(link.use, {}).get(moment, {}).get(layer.name)
                    payload += [delta.mean, delta.var, torch.tensor(delta.calls)] if delta else [None, None, None]
            self._deltas.pop(link.use, None)
        return payload

    def add_gradients(self, stage: int, mirror: int, payload: Payload, moments: Sequence[_Moment]) -> None:
        """Take a mirror's gradients and statistics into this owner's sums."""
        link = self._link(stage, mirror, self._rank)
        trainable = self._trainable(link)
        for name, gradient in zip(trainable, payload, strict=False):
            self._sums.setdefault(name, GradientSum()).add(link.use, gradient)
        rest = payload[len(trainable) :]
        names = [layer.name for layer in self._replicas[0, stage].norms if layer.writes] if rest else []
        for i, (name, moment) in enumerate((name, moment) for name in names for moment in moments):
            mean, var, calls = rest[3 * i : 3 * i + 3]
            if mean is not None and var is not None and calls is not None:
                delta = Delta(mean, var, int(calls))
                self._deltas.setdefault(link.use, {}).setdefault(moment, {})[name] = delta

    # ------------------------------------------------------------------ details

    def _apply_statistics(self) -> None:
        """Update the owned batch-norm layers with the deltas of all micro-batches, in order."""
        for (pipe, stage), replica in self._replicas.items():
            if pipe:
                continue
            moments: dict[_Moment, dict[str, Delta]] = {}
            for use in [use for use in self._deltas if use[1] == stage]:
                moments.update(self._deltas.pop(use))
            for layer in replica.norms:
                layer.apply({moment: deltas[layer.name] for moment, deltas in moments.items() if layer.name in deltas})

    def _link(self, stage: int, mirror: int, owner: int) -> _Link:
        pipe = next(pipe for pipe, held in self._placement.replicas(mirror) if held == stage)
        pipes, plan = self._placement.pipes, self._plan
        names = tuple(name for name in plan.stages[stage].parameters if pipes[0][plan.owner[name]] == owner)
        # of all recordings so far, which every replica of the stage has learned in the same order
        buffers = tuple(self._replicas_of(stage)[0].buffers) if pipe and pipes[0][stage] == owner else ()
        return _Link((pipe, stage), names, buffers)

    def _trainable(self, link: _Link) -> list[str]:
        """The link's parameters that get gradients; frozen ones send none."""
        return [name for name in link.parameters if self._parameter(name).requires_grad]

    def _parameter(self, name: str) -> nn.Parameter:
        return next(replica.parameters[name] for replica in self._replicas.values() if name in replica.parameters)

    def _replicas_of(self, stage: int) -> list[Replica]:
        return [replica for (_, held), replica in sorted(self._replicas.items()) if held == stage]

    def _meta(self, name: str) -> TensorMeta:
        for replica in self._replicas.values():
            tensor = replica.parameters.get(name, replica.buffers.get(name))
            if tensor is not None:
                return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, False)
        raise KeyError(name)
