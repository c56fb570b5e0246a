"""Run one rank's list of actions: compute, hand over, take what is needed.

Receives are posted when the step starts, in projected order, so a RECV needs no action of its own: a compute waits for its data.
Sends return at once.  Every action is timed, which makes the measured Timeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.batches.loss import loss_of
from fxchimera.runtime.batches.losscheck import refuse_other_leaves
from fxchimera.runtime.batches.placedloss import placed_loss
from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.devices.lanetimes import LaneTimed, lane_events
from fxchimera.runtime.failures.failure import Failure
from fxchimera.runtime.failures.place import IDLE
from fxchimera.runtime.failures.position import Position
from fxchimera.runtime.failures.report import KEPT_ACTIONS
from fxchimera.runtime.failures.shortage import is_shortage
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.messages.mailbox import Mailbox
from fxchimera.runtime.processes.width import Width
from fxchimera.runtime.sharded import loss_without_weight
from fxchimera.runtime.stages.program import Program
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.buckets import Buckets
from fxchimera.runtime.steps.errands import Errands
from fxchimera.runtime.steps.exchange import Exchange
from fxchimera.runtime.steps.feed import feed_of
from fxchimera.runtime.steps.job import Job, Result
from fxchimera.runtime.steps.script import Cue, Message, Script, Scripts
from fxchimera.runtime.steps.wrongpath import WrongPaths
from fxchimera.runtime.timed import Timed, shown
from fxchimera.runtime.transport import Transport
from fxchimera.schedule.action import Action
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.timeline import Event
from fxchimera_passes._torch import profiling
from fxchimera_passes.keyed import many_microbatches

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
        width: Width | None = None,
        lane: Lane | None = None,
    ) -> None:
        self.rank = rank
        self.exchange, self.replicas, self.lane = exchange, replicas, lane
        self._placement, self._transport, self._failure = placement, transport, failure
        self._scripts = Scripts(rank, placement, replicas)
        self.memory = ""  # what the plan says of it, for an error
        self.recent: deque[Event] = deque(maxlen=KEPT_ACTIONS)
        self._buckets = Buckets(rank, exchange, replicas, width) if width is not None else None

    def run(self, job: Job) -> Result:
        """Run this rank's actions of ``job.order``; the gradients wait in the exchange for its ``commit`` or ``abandon``.

        Raises:
            PipelineError: An action failed here or on another rank; the message names the first cause.
        """
        if self.lane is not None:
            job = replace(job, loss_fn=placed_loss(job.loss_fn, self.lane.device))
        run = _Run(self, self._placement, self._transport, job, self._buckets)
        failure = self._failure
        try:
            script = self._scripts.of(job.order, job.programs)
            run.begin(script)
            with many_microbatches():
                for cue in script.cues:
                    if failure.cause is not None:
                        failure.check()
                    failure.mark(self.rank, cue.position.label)
                    run.act(cue)
            run.finish()
        except Exception as error:
            original = self._failure.cause is None  # else what fails here follows from that
            raise self._blame(error, run) from (error if original else None)
        except BaseException as interruption:  # Ctrl-C stays what it is, but the other ranks hear of it
            self._blame(interruption, run)
            raise
        finally:
            self.recent.extend(run.result.events)
            failure.mark(self.rank, IDLE)
        return run.result

    def _blame(self, error: BaseException, run: _Run) -> PipelineError:
        if self._failure.cause is not None:
            return self._failure.cause.error()
        text = f"{run.position.on_rank()}: {type(error).__name__}: {error}"
        if is_shortage(error) and self.memory:
            text += f" ({self.memory})"
        return self._failure.report(self._failure.cause_at(self.rank, text)).error()


class _Run:
    """The state of one job on one rank."""

    def __init__(self, executor: Executor, placement: Placement, transport: Transport, job: Job, buckets: Buckets | None) -> None:
        self.result = Result()
        self.position = Position(executor.rank, None, placement)
        self._rank, self._placement, self._replicas = executor.rank, placement, executor.replicas
        self._exchange, self._transport, self._job, self._lane = executor.exchange, transport, job, executor.lane
        self._outbox: dict[Key, Payload] = {}
        self._losses: dict[int, torch.Tensor] = {}
        deferred = any(replica.deferred for replica in executor.replicas.values())
        self._deferred_norms = deferred or len(placement.pipes) > 1 or buckets is not None
        self._errands = Errands(executor.rank, placement, executor.exchange, transport, job, buckets)
        self._wrong = WrongPaths(executor.rank, job, self.result, executor.lane)
        self._profiled = profiling()
        self._computes = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weight_part}

    def begin(self, script: Script) -> None:
        """Post all receives and set earlier gradients aside."""
        if self._job.train:
            self._exchange.begin()
            for (pipe, _), replica in self._replicas.items():
                replica.begin(self._placement.microbatches(pipe))
        self._exchange.alias_local()
        self._feed = feed_of(self._job, self._lane, script.cues)
        self._mailbox = Mailbox(self._transport, [*script.expected, *self._errands.expected(script)])
        self._errands.begin(script, self._mailbox)

    def act(self, cue: Cue) -> None:
        """Do one action."""
        self.position = cue.position
        if cue.replica is None:
            with self._timed(cue.action):
                self._send(cue)
        elif cue.program is not None and cue.program.captured.assumed:
            self._attempt(cue)
        else:
            self._computes[cue.action.kind.value](cue)
        if self._errands.may_take_gradients():
            self._take_gradients()

    def finish(self) -> None:
        """Take what is still to come."""
        self._errands.refresh_all(self._timed)
        if not self._job.train:
            for replica in self._replicas.values():
                self._exchange.note_statistics(replica, self._job.step)
        while self._errands.gradients:
            self._take_gradients()
        self._errands.finish()
        if self._lane is not None:  # until here the events were the host's, for a report of a failure
            self.result.events[:] = lane_events(self._rank, self._lane)

    # ------------------------------------------------------------------ computes

    def _attempt(self, cue: Cue) -> None:
        """Do a computation of a micro-batch whose answers were assumed."""
        with self._wrong.noticing(cue):
            done = self._wrong.attempt(cue, self._computes[cue.action.kind.value], self._take)
        if not done:
            if cue.result is not None:
                self._outbox[cue.result] = self._wrong.blanks(cue)
            if cue.closes:
                self._close(cue)

    def _forward(self, cue: Cue) -> None:
        job, microbatch, program, replica = self._job, cue.microbatch, cue.program, cue.replica
        assert program is not None
        assert replica is not None
        self._errands.refresh(cue.action.stage, self._timed)
        received: Payload = []
        if cue.reads is not None:
            received = self._take(cue.reads)
            if self._transport.shares_memory or cue.reads.stays:
                # the stage may write into what it received, and the stage before needs it for its backward
                received = [None if t is None else t.detach().clone(memory_format=torch.preserve_format) for t in received]
        fed, late = self._feed.take(microbatch), self._deferred_norms
        with self._timed(cue.action), job.randomness(microbatch, held=True):
            outputs = replica.forward(microbatch, program, received, fed.inputs, deferred_norms=late, split=cue.split)
            if job.watched:
                self.result.crossings[cue.action.stage, microbatch] = [tensor.detach().clone() for tensor in outputs]
            if cue.result is None:
                self._end_of_model(microbatch, program, outputs, fed.target)
            else:
                self._outbox[cue.result] = [*outputs]

    def _end_of_model(self, microbatch: int, program: Program, outputs: list[torch.Tensor], target: object) -> None:
        job = self._job
        output = program.captured.out_structure.rebuild(outputs)
        if job.wants_loss:
            ends = [tensor.grad_fn for tensor in outputs]
            loss = loss_of(output, target, job.loss_fn)
            if job.train and job.loss_fn is not None:
                refuse_other_leaves(loss, outputs, ends, job.loss_fn, program.captured.model)
            shared = program.shells and not job.weights[microbatch]
            self._losses[microbatch] = loss_without_weight(loss, outputs) if shared else loss
            self.result.losses[microbatch] = loss.detach()
        if job.wants_outputs:
            self.result.outputs[microbatch] = output

    def _backward(self, cue: Cue) -> None:
        job, microbatch, replica = self._job, cue.microbatch, cue.replica
        assert replica is not None
        received = [] if cue.reads is None else self._take(cue.reads)
        weight = job.weights[microbatch]
        with self._timed(cue.action), job.randomness(microbatch, held=True):
            loss = self._losses.pop(microbatch, None) if cue.is_last else None
            if not weight and not (cue.program is not None and cue.program.shells):
                loss = None  # nothing in it counts; a mean over nothing has nan gradients, and 0 times nan is nan
            gradients = replica.backward(microbatch, received, loss, weight * job.loss_scale)
        if cue.result is not None:
            self._outbox[cue.result] = gradients
        if cue.closes:
            self._close(cue)

    def _weight_part(self, cue: Cue) -> None:
        job, replica = self._job, cue.replica
        assert replica is not None
        with self._timed(cue.action), job.randomness(cue.microbatch, held=True):
            replica.weight_part(cue.microbatch)
        if cue.closes:
            self._close(cue)

    def _close(self, cue: Cue) -> None:
        assert cue.replica is not None
        self._errands.close(cue.replica)

    # ------------------------------------------------------------------ messages

    def _take(self, message: Message) -> Payload:
        """Return what the neighbouring stage has left: from this rank's own outbox, or by message."""
        if message.stays:
            return self._outbox.pop(message.key)
        if self._profiled:
            with shown(message.position.action):
                return self._mailbox.take(message.channel, message.key, message.position) if message.metas else []
        return self._mailbox.take(message.channel, message.key, message.position) if message.metas else []

    def _send(self, cue: Cue) -> None:
        action, message = cue.action, cue.message
        if message is not None:
            payload = self._outbox.pop(message.key)
            if message.metas:
                self._transport.send(message.channel, message.key, payload, message.metas)
            return
        self._errands.send(action)

    def _take_gradients(self) -> None:
        """Take the next mirror's gradients."""
        action = self._errands.gradients[0]
        self.position = Position(self._rank, action, self._placement)
        with self._timed(action):
            self._errands.take_gradients()

    def _timed(self, action: Action) -> Timed:
        if self._lane is not None:
            return LaneTimed(self._rank, action, self.result.events, self._lane, profiled=self._profiled)
        return Timed(self._rank, action, self.result.events, profiled=self._profiled)
