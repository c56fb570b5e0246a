"""What one rank does in a job, worked out once: a list of cues with everything resolved that does not change from step to step.

    order + placement + recordings + replicas  ->  Script       once; kept while the same come again
    Script + batch                             ->  executor     goes down the list and looks nothing up

A receive is no cue: all receives are posted when the job begins, and a computation waits for what it reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxchimera.runtime.failures.position import Position
from fxchimera.runtime.message import Key
from fxchimera.runtime.stages.program import Program
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.transport import Channel, Expected
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import channel, peer
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement
from fxchimera_passes.captured import TensorMeta

__all__ = ["Cue", "Message", "Script", "Scripts"]

_KEPT = 8  # recordings of other signatures and modes, and the three orders of a pipeline, come back


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One end of a message that belongs to a micro-batch; with ``stays``, both ends are on this rank and nothing is sent."""

    channel: Channel
    key: Key
    metas: tuple[TensorMeta, ...]
    stays: bool
    position: Position


@dataclass(frozen=True, slots=True, eq=False)
class Cue:
    """One action that is not a receive.

    A computation has its ``replica`` and ``program``, what it ``reads`` from the neighbouring stage, and the key under which its
    ``result`` waits for being sent; ``split`` tells a forward that its backward comes in two parts, ``closes`` that the replica has
    run all its backwards.  A send of activations or their gradients has a ``message``; the exchange between replicas has neither.
    """

    action: Action
    position: Position
    microbatch: int = -1
    replica: Replica | None = None
    program: Program | None = None
    reads: Message | None = None
    result: Key | None = None
    message: Message | None = None
    is_last: bool = False
    split: bool = False
    closes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """All cues of one rank; ``expected`` are the messages of micro-batches, in the order in which their senders send them.

    ``refreshes`` and ``gradients`` are the receives of the exchange between replicas.
    """

    order: Order
    cues: tuple[Cue, ...]
    expected: tuple[Expected, ...]
    refreshes: tuple[Action, ...]
    gradients: tuple[Action, ...]


class Scripts:
    """Makes the scripts of one rank, and keeps the latest."""

    def __init__(self, rank: int, placement: Placement, replicas: Mapping[tuple[int, int], Replica]) -> None:
        self._rank, self._placement, self._replicas = rank, placement, replicas
        self._kept: OrderedDict[tuple[int, tuple[Program, ...]], Script] = OrderedDict()

    def of(self, order: Order, programs: tuple[Program, ...]) -> Script:
        """Return the script of ``order`` when micro-batch ``m`` runs ``programs[m]``."""
        key = (id(order), programs)
        script = self._kept.get(key)
        if script is None or script.order is not order:
            script = self._kept[key] = self._make(order, programs)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return script

    def _make(self, order: Order, programs: tuple[Program, ...]) -> Script:
        actions = order.ranks[self._rank]
        make = _Maker(self._rank, self._placement, self._replicas, programs, actions)
        makers: dict[bool, Callable[[Action], Cue]] = {True: make.compute, False: make.send}
        receives = [make.message(action) for action in actions if action.kind.is_recv and action.microbatch is not None]
        return Script(
            order,
            cues=tuple(makers[action.kind.is_compute](action) for action in actions if not action.kind.is_recv),
            expected=tuple(Expected(one.channel, one.key, one.metas) for one in receives if one.metas),
            refreshes=tuple(action for action in actions if action.kind is Kind.RECV_P),
            gradients=tuple(action for action in actions if action.kind is Kind.RECV_G),
        )


class _Maker:
    """Resolves the actions of one script."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        replicas: Mapping[tuple[int, int], Replica],
        programs: tuple[Program, ...],
        actions: tuple[Action, ...],
    ) -> None:
        self._rank, self._placement, self._replicas, self._programs = rank, placement, replicas, programs
        ends = [action for action in actions if action.kind in (Kind.B, Kind.W)]
        self._last = {(placement.pipe_of[microbatch_of(action)], action.stage): action for action in ends}
        self._split = {(action.stage, action.microbatch) for action in ends if action.kind is Kind.W}

    def compute(self, action: Action) -> Cue:
        """A computation."""
        place, microbatch, stage, kind = self._placement, microbatch_of(action), action.stage, action.kind
        use = (place.pipe_of[microbatch], stage)
        is_last = stage == place.num_stages - 1
        reads = sends = None
        if kind is Kind.F:
            reads = Action(stage, Kind.RECV_F, microbatch) if stage else None
            sends = None if is_last else Action(stage, Kind.SEND_F, microbatch)
        elif kind is not Kind.W:
            reads = None if is_last else Action(stage, Kind.RECV_B, microbatch)
            sends = Action(stage, Kind.SEND_B, microbatch) if stage else None
        return Cue(
            action,
            Position(self._rank, action, place),
            microbatch=microbatch,
            replica=self._replicas[use],
            program=self._programs[microbatch],
            reads=self.message(reads) if reads else None,
            result=Key.of(sends) if sends else None,
            is_last=is_last,
            split=(stage, microbatch) in self._split,
            closes=self._last.get(use) == action,
        )

    def send(self, action: Action) -> Cue:
        """A send; the exchange between replicas is resolved when it happens, as it depends on which parameters are frozen."""
        message = None if action.kind.is_sync else self.message(action)
        return Cue(action, Position(self._rank, action, self._placement), message=message)

    def message(self, action: Action) -> Message:
        """One end of a message."""
        place, stage, program = self._placement, action.stage, self._programs[microbatch_of(action)]
        if action.kind.content == "F":
            metas = program.forward_metas(stage + 1 if action.kind is Kind.SEND_F else stage)
        else:
            metas = program.backward_metas(stage - 1 if action.kind is Kind.SEND_B else stage)
        stays = peer(action, self._rank, place) == self._rank
        return Message(channel(action, self._rank, place), Key.of(action), metas, stays, Position(self._rank, action, place))


def microbatch_of(action: Action) -> int:
    """The micro-batch of an action that has one."""
    assert action.microbatch is not None
    return action.microbatch
