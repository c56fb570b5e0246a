"""What one rank does in a job beside computing: parameters to mirrors, gradients to owners, and sums over the pipelines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from fxchimera.runtime.failures.position import Position
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.messages.mailbox import Mailbox
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.buckets import Buckets, from_mirror, from_own
from fxchimera.runtime.steps.exchange import Exchange
from fxchimera.runtime.steps.job import Job
from fxchimera.runtime.steps.script import Script
from fxchimera.runtime.transport import Expected, Transport
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import channel
from fxchimera.schedule.placement import Placement
from fxchimera_passes.captured import TensorMeta

__all__ = ["Errands"]

_Timed = Callable[[Action], AbstractContextManager[object]]


class Errands:
    """The exchange between replicas in one job, as one rank takes part in it; ``gradients`` are those still to be taken."""

    def __init__(
        self, rank: int, placement: Placement, exchange: Exchange, transport: Transport, job: Job, buckets: Buckets | None
    ) -> None:
        self._rank, self._placement, self._exchange, self._transport, self._job = rank, placement, exchange, transport, job
        self._deferred_norms = len(placement.pipes) > 1 or buckets is not None
        self._sums = buckets.begin(job.order) if buckets is not None and job.train and job.synchronised else None
        self._refreshes: dict[int, list[Action]] = {}
        self.gradients: deque[Action] = deque()

    def expected(self, script: Script) -> list[Expected]:
        """The messages that will come in."""
        exchanged = [self._expected(action) for action in (*script.refreshes, *script.gradients)]
        return [one for one in exchanged if one.metas]

    def begin(self, script: Script, mailbox: Mailbox) -> None:
        """Begin, now that the receives are posted."""
        self._mailbox = mailbox
        self.gradients.extend(script.gradients)
        for action in script.refreshes:
            self._refreshes.setdefault(action.stage, []).append(action)

    def send(self, action: Action) -> None:
        """Send parameters to a mirror, or gradients to an owner."""
        assert action.peer is not None
        one = self._expected(action)
        if action.kind is Kind.SEND_P:
            payload = self._exchange.refresh_payload(action.stage, action.peer)
        else:
            payload = self._exchange.gradient_payload(action.stage, action.peer, self._moments(action.stage, self._rank))
        if one.metas:
            self._transport.send(one.channel, one.key, payload, one.metas)

    def refresh(self, stage: int, timed: _Timed) -> None:
        """Wait for the owners' parameters before the first compute of a mirror."""
        for action in self._refreshes.pop(stage, ()) if self._refreshes else ():
            assert action.peer is not None
            with timed(action):
                payload = self._receive(action)
            self._exchange.refresh(stage, action.peer, payload)

    def refresh_all(self, timed: _Timed) -> None:
        """Wait for the parameters of mirrors that have computed nothing."""
        for stage in list(self._refreshes):
            self.refresh(stage, timed)

    def close(self, replica: Replica) -> None:
        """Take the gradients off a replica whose last backward of the step is done."""
        self._exchange.close_replica(replica, self._job.step)
        if self._sums is not None:
            self._sums.note(from_own(replica.pipe, replica.stage))

    def may_take_gradients(self) -> bool:
        """Whether the sums over the pipelines can go on with the next mirror's gradients, which are there."""
        if self._sums is None or not self.gradients:
            return False
        one = self._expected(self.gradients[0])
        return not one.metas or self._transport.has(one.channel)

    def take_gradients(self) -> None:
        """Take the next mirror's gradients."""
        action = self.gradients.popleft()
        assert action.peer is not None
        payload = self._receive(action)
        self._exchange.add_gradients(action.stage, action.peer, payload, self._moments(action.stage, action.peer))
        if self._sums is not None:
            self._sums.note(from_mirror(action))

    def finish(self) -> None:
        """Wait for the sums over the pipelines."""
        if self._sums is not None:
            self._sums.finish()

    # ------------------------------------------------------------------ details

    def _receive(self, action: Action) -> Payload:
        one = self._expected(action)
        return self._mailbox.take(one.channel, one.key, Position(self._rank, action, self._placement)) if one.metas else []

    def _expected(self, action: Action) -> Expected:
        """Either end of a message."""
        return Expected(channel(action, self._rank, self._placement), Key.of(action), self._metas(action))

    def _metas(self, action: Action) -> tuple[TensorMeta, ...]:
        stage, receives = action.stage, action.kind.is_recv
        assert action.peer is not None
        if action.kind.content == "P":
            mirror, owner = (self._rank, action.peer) if receives else (action.peer, self._rank)
            return self._exchange.refresh_metas(stage, mirror, owner)
        mirror, owner = (action.peer, self._rank) if receives else (self._rank, action.peer)
        return self._exchange.gradient_metas(stage, mirror, owner, self._moments(stage, mirror))

    def _moments(self, stage: int, mirror: int) -> list[tuple[int, int]]:
        """The micro-batches, of this step and of those left unsynchronised before it, that a mirror has seen."""
        if not self._deferred_norms:
            return []
        pipe = next(pipe for pipe, held in self._placement.replicas(mirror) if held == stage)
        numbers = [self._job.batch.microbatches[microbatch].number for microbatch in self._placement.microbatches(pipe)]
        return [(step, number) for step in self._job.pending_steps for number in numbers]
