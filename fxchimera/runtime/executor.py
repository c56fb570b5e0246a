"""Run one rank's list of actions: compute, hand over, take what is needed.

Receives are posted when the step starts, in projected order, so a RECV needs no action of its own: a compute waits for its data.
Sends return at once.  Every action is timed, which makes the measured Timeline.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.exchange import Exchange
from fxchimera.runtime.failure import Cause, Failure
from fxchimera.runtime.job import Job, Result
from fxchimera.runtime.loss import loss_of
from fxchimera.runtime.losscheck import refuse_other_leaves
from fxchimera.runtime.mailbox import Mailbox
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.position import Position
from fxchimera.runtime.program import Program
from fxchimera.runtime.replica import Replica
from fxchimera.runtime.timed import Timed
from fxchimera.runtime.transport import Expected, Transport
from fxchimera.runtime.wrongpath import WrongPaths
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import channel, peer
from fxchimera.schedule.placement import Placement
from fxchimera_passes._torch import profiling
from fxchimera_passes.captured import TensorMeta
from fxchimera_passes.keyed import microbatch_randomness

__all__ = ["Executor"]


class Executor:
    """One rank: its replicas, its exchange with other ranks, and the transport."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        replicas: Mapping[tuple[int, int], Replica],
        exchange: Exchange,
        transport: Transport,
        failure: Failure,
    ) -> None:
        self.rank = rank
        self.exchange = exchange
        self.replicas = replicas
        self._placement = placement
        self._transport = transport
        self._failure = failure

    def run(self, job: Job) -> Result:
        """Run this rank's actions of ``job.order``; the gradients wait in the exchange for its ``commit`` or ``abandon``.

        Raises:
            PipelineError: An action failed here or on another rank; the message names the first cause.
        """
        run = _Run(self.rank, self._placement, self.replicas, self.exchange, self._transport, job)
        try:
            run.begin()
            for action in job.order.ranks[self.rank]:
                self._failure.check()
                run.act(action)
            run.finish()
        except Exception as error:
            raise self._blame(error, run) from error
        except BaseException as interruption:  # Ctrl-C stays what it is, but the other ranks hear of it
            self._blame(interruption, run)
            raise
        return run.result

    def _blame(self, error: BaseException, run: _Run) -> PipelineError:
        if self._failure.cause is not None:
            return self._failure.cause.error()
        text = f"{run.position.on_rank()}: {type(error).__name__}: {error}"
        return self._failure.report(Cause(self.rank, text)).error()


class _Run:
    """The state of one job on one rank."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        replicas: Mapping[tuple[int, int], Replica],
        exchange: Exchange,
        transport: Transport,
        job: Job,
    ) -> None:
        self.result = Result()
        self.position = Position(rank, None, placement)
        self._rank, self._placement, self._replicas = rank, placement, replicas
        self._exchange, self._transport, self._job = exchange, transport, job
        self._actions = job.order.ranks[rank]
        self._outbox: dict[Key, Payload] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._refreshes: dict[int, list[Action]] = {}
        ends = [a for a in self._actions if a.kind in (Kind.B, Kind.W)]
        self._last_backward = {(placement.pipe_of[_mb(a)], a.stage): a for a in ends}
        self._split = {(a.stage, a.microbatch) for a in ends if a.kind is Kind.W}
        self._deferred_norms = len(placement.pipes) > 1
        self._wrong = WrongPaths(rank, job, self.result)
        self._profiled = profiling()

    def begin(self) -> None:
        """Post all receives and set earlier gradients aside."""
        if self._job.train:
            self._exchange.begin()
            for (pipe, _), replica in self._replicas.items():
                replica.begin(self._placement.microbatches(pipe))
        self._exchange.alias_local()
        expected = []
        for action in self._actions:
            if action.kind.is_recv and (metas := self._metas(action)):
                expected.append(Expected(channel(action, self._rank, self._placement), Key.of(action), metas))
            if action.kind is Kind.RECV_P:
                self._refreshes.setdefault(action.stage, []).append(action)
        self._mailbox = Mailbox(self._transport, expected)

    def act(self, action: Action) -> None:
        """Do one action."""
        self.position = Position(self._rank, action, self._placement)
        if action.kind.is_compute:
            self._compute(action)
        elif action.kind.is_send:
            with self._timed(action):
                self._send(action)

    def finish(self) -> None:
        """Take what is still to come."""
        for stage in list(self._refreshes):
            self._refresh(stage)
        if not self._job.train:
            for replica in self._replicas.values():
                self._exchange.note_statistics(replica, self._job.step)
        for action in self._actions:
            if action.kind is Kind.RECV_G:
                self.position = Position(self._rank, action, self._placement)
                assert action.peer is not None
                with self._timed(action):
                    payload = self._receive(action)
                self._exchange.add_gradients(action.stage, action.peer, payload, self._moments(action.stage, action.peer))

    # ------------------------------------------------------------------ computes

    def _compute(self, action: Action) -> None:
        computes = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward, Kind.W: self._weight_part}
        if not self._wrong.attempt(action, computes[action.kind], self._take, self.position):
            self._outbox.update(self._wrong.blanks(action))
            if action.kind is not Kind.F:
                self._close_after(action, self._replica(action))

    def _forward(self, action: Action) -> None:
        microbatch, stage = _mb(action), action.stage
        self._refresh(stage)
        job = self._job
        program, inputs = job.programs[microbatch], job.batch.microbatches[microbatch].inputs
        split = (stage, microbatch) in self._split
        received: Payload = []
        if stage > 0:
            received = self._take(Action(stage, Kind.RECV_F, microbatch))
            if self._transport.shares_memory or self._stays(Action(stage, Kind.RECV_F, microbatch)):
                # the stage may write into what it received, and the stage before needs it for its backward
                received = [None if t is None else t.detach().clone(memory_format=torch.preserve_format) for t in received]
        with self._timed(action), microbatch_randomness(job.seed, job.step, microbatch):
            with self._wrong.noticing(microbatch):
                outputs = self._replica(action).forward(
                    microbatch, program, received, inputs, deferred_norms=self._deferred_norms, split=split
                )
            if stage == self._placement.num_stages - 1:
                self._end_of_model(microbatch, program, outputs)
            else:
                self._outbox[Key.of(Action(stage, Kind.SEND_F, microbatch))] = list(outputs)

    def _end_of_model(self, microbatch: int, program: Program, outputs: list[torch.Tensor]) -> None:
        job = self._job
        output = program.captured.out_structure.rebuild(outputs)
        if job.wants_loss:
            ends = [tensor.grad_fn for tensor in outputs]
            loss = loss_of(output, job.batch.microbatches[microbatch].target, job.loss_fn)
            if job.train and job.loss_fn is not None:
                refuse_other_leaves(loss, outputs, ends, job.loss_fn, program.captured.model)
            self._losses[microbatch] = loss
            self.result.losses[microbatch] = loss.detach()
        if job.wants_outputs:
            self.result.outputs[microbatch] = output

    def _backward(self, action: Action) -> None:
        microbatch, stage = _mb(action), action.stage
        is_last = stage == self._placement.num_stages - 1
        received = [] if is_last else self._take(Action(stage, Kind.RECV_B, microbatch))
        replica = self._replica(action)
        seed = self._job.weights[microbatch] * self._job.loss_scale
        with self._timed(action), microbatch_randomness(self._job.seed, self._job.step, microbatch):
            loss = self._losses.pop(microbatch, None)
            if not self._job.weights[microbatch]:
                loss = None  # nothing in it counts; a mean over nothing has nan gradients, and 0 times nan is nan
            gradients = replica.backward(microbatch, received, loss, seed)
        if stage > 0:
            self._outbox[Key.of(Action(stage, Kind.SEND_B, microbatch))] = gradients
        self._close_after(action, replica)

    def _weight_part(self, action: Action) -> None:
        replica = self._replica(action)
        with self._timed(action), microbatch_randomness(self._job.seed, self._job.step, _mb(action)):
            replica.weight_part(_mb(action))
        self._close_after(action, replica)

    def _close_after(self, action: Action, replica: Replica) -> None:
        if self._last_backward[replica.pipe, replica.stage] == action:
            self._exchange.close_replica(replica, self._job.step)

    # ------------------------------------------------------------------ messages

    def _send(self, action: Action) -> None:
        assert action.kind.is_send
        metas = self._metas(action)
        if action.kind is Kind.SEND_P:
            assert action.peer is not None
            payload = self._exchange.refresh_payload(action.stage, action.peer)
        elif action.kind is Kind.SEND_G:
            assert action.peer is not None
            payload = self._exchange.gradient_payload(action.stage, action.peer, self._moments(action.stage, self._rank))
        else:
            payload = self._outbox.pop(Key.of(action))
        if metas:
            self._transport.send(channel(action, self._rank, self._placement), Key.of(action), payload, metas)

    def _take(self, action: Action) -> Payload:
        """Return what the neighbouring stage has left for ``action``: from this rank's own outbox, or by message."""
        return self._outbox.pop(Key.of(action)) if self._stays(action) else self._receive(action)

    def _stays(self, action: Action) -> bool:
        """Whether both ends of a message are on this rank, so that there is none."""
        return peer(action, self._rank, self._placement) == self._rank

    def _receive(self, action: Action) -> Payload:
        if not self._metas(action):
            return []
        what = Position(self._rank, action, self._placement)
        return self._mailbox.take(channel(action, self._rank, self._placement), Key.of(action), what)

    def _refresh(self, stage: int) -> None:
        """Wait for the owners' parameters before the first compute of a mirror."""
        for action in self._refreshes.pop(stage, ()):
            assert action.peer is not None
            with self._timed(action):
                payload = self._receive(action)
            self._exchange.refresh(stage, action.peer, payload)

    def _metas(self, action: Action) -> tuple[TensorMeta, ...]:
        stage = action.stage
        if action.peer is not None:
            receives = action.kind.is_recv
            if action.kind.content == "P":
                mirror, owner = (self._rank, action.peer) if receives else (action.peer, self._rank)
                return self._exchange.refresh_metas(stage, mirror, owner)
            mirror, owner = (action.peer, self._rank) if receives else (self._rank, action.peer)
            return self._exchange.gradient_metas(stage, mirror, owner, self._moments(stage, mirror))
        program = self._job.programs[_mb(action)]
        if action.kind is Kind.SEND_F:
            return program.forward_metas(stage + 1)
        if action.kind is Kind.RECV_F:
            return program.forward_metas(stage)
        return program.backward_metas(stage - 1 if action.kind is Kind.SEND_B else stage)

    # ------------------------------------------------------------------ details

    def _moments(self, stage: int, mirror: int) -> list[tuple[int, int]]:
        """The micro-batches, of this step and of those left unsynchronised before it, that a mirror has seen."""
        if not self._deferred_norms:
            return []
        pipe = next(pipe for pipe, held in self._placement.replicas(mirror) if held == stage)
        return [(step, microbatch) for step in self._job.pending_steps for microbatch in self._placement.microbatches(pipe)]

    def _replica(self, action: Action) -> Replica:
        return self._replicas[self._placement.pipe_of[_mb(action)], action.stage]

    def _timed(self, action: Action) -> Timed:
        return Timed(self._rank, action, self.result.events, profiled=self._profiled)


def _mb(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
