"""Measure a pipeline stage by stage: real values go down through the stages once, and their gradients come back up.

    rank 0   F --.                         .-- F B F I W  (rounds)
    rank 1        `-- F --.           .-- F B F I W --'
    rank 2                 `-- F B F I W --'

A stage is timed while it holds what its neighbours really send, over the transport of a step, so ranks may be threads or processes.
Nobody computes meanwhile: what a stage takes by itself is what the order is planned with.  Before that each pair of neighbours
exchanges a small and a large message a few times.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.devices.crew import Crew
from fxchimera.runtime.devices.lanes import Lanes
from fxchimera.runtime.failures.failure import Failure
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.messages.mailbox import Mailbox
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.stagetimes import Sample, now, pass_through, time_stage
from fxchimera.runtime.transport import Channel, Expected, Transport
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import channel
from fxchimera.schedule.measurement import LinkTimes, Measurement, StageTimes
from fxchimera.schedule.placement import Placement
from fxchimera_passes.captured import TensorMeta
from fxchimera_passes.cost import NodeCosts, measured_stage
from fxchimera_passes.keyed import microbatch_randomness

__all__ = ["Found", "Probe", "boundaries", "measure", "probe_channels"]

_SMALL_BYTES, _LEAST_LARGE, _MOST_LARGE = 8, 1 << 20, 1 << 24


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank measured: its stages of the first pipe, the links of which it is the first end, and nodes if asked to."""

    stages: dict[int, StageTimes]
    links: dict[tuple[int, int], LinkTimes]
    nodes: NodeCosts


def measure(probes: Sequence[Probe], world: World, lanes: Lanes) -> tuple[Measurement, NodeCosts]:
    """Collective: run the probes of this process, and return what all ranks have measured, the same on every rank.

    Raises:
        PipelineError: A rank failed; the message names the first cause.
    """
    crew = Crew(probes, world.failure)
    try:
        own = lanes.call(crew, Probe.run)
    finally:
        crew.close()
    everything = [found for process in world.gather_objects(own, "what profile() measured") for found in process]
    stages = {stage: times for found in everything for stage, times in found.stages.items()}
    links = {ranks: times for found in everything for ranks, times in found.links.items()}
    forward = {name: seconds for found in everything for name, seconds in found.nodes.forward.items()}
    backward = {name: seconds for found in everything for name, seconds in found.nodes.backward.items()}
    times = Measurement(tuple(stages[stage] for stage in sorted(stages)), tuple(links.values()))
    return times, NodeCosts(forward, backward)


def boundaries(placement: Placement) -> tuple[int, ...]:
    """The stages after which the first pipe changes rank, one for every pair of ranks."""
    ranks = placement.pipes[0]
    found: dict[frozenset[int], int] = {}
    for stage in range(placement.num_stages - 1):
        if ranks[stage] != ranks[stage + 1]:
            found.setdefault(frozenset(ranks[stage : stage + 2]), stage)
    return tuple(found.values())


def probe_channels(placement: Placement) -> tuple[Channel, ...]:
    """The channels that a measurement needs, in one order on all ranks."""
    ends = [end for stage in range(placement.num_stages - 1) for end in _ends(stage, placement)]
    return tuple(sorted({channel(action, rank, placement) for action, rank in ends if action.kind.is_send}))


def _ends(stage: int, placement: Placement) -> Iterator[tuple[Action, int]]:
    """The four ends of the two messages over the boundary after ``stage``, each with its rank; none where it stays on a rank."""
    ranks, microbatch = placement.pipes[0], placement.microbatches(0)[0]
    if ranks[stage] != ranks[stage + 1]:
        for kind, at in ((Kind.SEND_F, stage), (Kind.RECV_F, stage + 1), (Kind.SEND_B, stage + 1), (Kind.RECV_B, stage)):
            yield Action(at, kind, microbatch), ranks[at]


class Probe:
    """One rank of a measurement.

    Args:
        rank: Its number.
        placement: Where the stages are; those of the first pipe are timed.
        replicas: The rank's replicas of these, by stage.
        transport: Carries the messages of this rank.
        sample: What flows through the stages; the same micro-batch on every rank.
        failure: Where a failure is told.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        replicas: Mapping[int, Replica],
        transport: Transport,
        sample: Sample,
        failure: Failure,
    ) -> None:
        self.rank = rank
        self.replicas = replicas
        self._placement, self._transport, self._sample = placement, transport, sample
        self._failure = failure
        self._doing = "before the first message"
        self._kept: dict[Key, Payload] = {}  # between two stages of this rank
        self._forward: dict[str, float] = {}
        self._backward: dict[str, float] = {}

    def run(self) -> Found:
        """Measure.

        Raises:
            PipelineError: Something failed here or on another rank; the message names the first cause.
        """
        try:
            self._mailbox = Mailbox(self._transport, list(self._expected()))
            links = {ranks: times for stage in boundaries(self._placement) for ranks, times in self._link(stage)}
            return Found(self._stages(), links, NodeCosts(self._forward, self._backward))
        except Exception as error:
            raise self._blame(error) from error
        except BaseException as interruption:  # Ctrl-C stays what it is, but the other ranks hear of it
            self._blame(interruption)
            raise

    def _blame(self, error: BaseException) -> PipelineError:
        text = f"profile(), {self._doing}: {type(error).__name__}: {error}"
        return self._failure.report(self._failure.cause_at(self.rank, text)).error()

    # ------------------------------------------------------------------ stages

    def _stages(self) -> dict[int, StageTimes]:
        received: dict[int, list[torch.Tensor]] = {}
        found: dict[int, StageTimes] = {}
        for stage in sorted(self.replicas):
            received[stage] = _present(self._take(Action(stage, Kind.RECV_F, self._microbatch))) if stage else []
            self._doing = f"stage {stage}, forward"
            outputs = pass_through(self.replicas[stage], self._sample, received[stage])
            if stage < self._last:
                self._send(Action(stage, Kind.SEND_F, self._microbatch), [*outputs])
        for stage in sorted(self.replicas, reverse=True):
            gradients = self._take(Action(stage, Kind.RECV_B, self._microbatch)) if stage < self._last else None
            self._doing = f"stage {stage}, forward and backward"
            passage = time_stage(self.replicas[stage], self._sample, received[stage], gradients)
            found[stage] = passage.times
            if self._sample.nodes:
                self._time_nodes(stage, received[stage])
            del received[stage]
            if stage:
                self._send(Action(stage, Kind.SEND_B, self._microbatch), passage.gradients)
        return found

    def _time_nodes(self, stage: int, received: Sequence[torch.Tensor]) -> None:
        program = self._sample.program
        self._doing = f"stage {stage}, node by node"
        try:
            with microbatch_randomness(*self._sample.randomness), torch.enable_grad():
                costs = measured_stage(program.captured, program.stage(stage), received, self._sample.inputs)
        except Exception as error:  # a node may need what only the whole stage sets up
            warnings.warn(
                f"the operations of stage {stage} could not be timed one by one ({type(error).__name__}: {error}); their shares of "
                "its measured seconds are estimated",
                stacklevel=2,
            )
            return
        self._forward.update(costs.forward)
        self._backward.update(costs.backward)

    def _send(self, action: Action, payload: Payload) -> None:
        metas = self._metas(action)
        if self._stays(action):
            self._kept[Key.of(action)] = payload
        elif metas:
            self._transport.send(channel(action, self.rank, self._placement), Key.of(action), payload, metas)

    def _take(self, action: Action) -> Payload:
        self._doing = f"stage {action.stage}, waiting for the neighbouring stage"
        if self._stays(action):
            return self._kept.pop(Key.of(action))
        if not self._metas(action):
            return []
        what = f"rank {self.rank}, {self._doing},"
        return self._mailbox.take(channel(action, self.rank, self._placement), Key.of(action), what)

    def _metas(self, action: Action) -> tuple[TensorMeta, ...]:
        program, stage = self._sample.program, action.stage
        if action.kind.content == "F":
            return program.forward_metas(stage + 1 if action.kind.is_send else stage)
        return program.backward_metas(stage - 1 if action.kind.is_send else stage)

    def _stays(self, action: Action) -> bool:
        ranks, before = self._placement.pipes[0], action.kind in (Kind.RECV_F, Kind.SEND_B)
        return ranks[action.stage + (-1 if before else 1)] == self.rank

    # ------------------------------------------------------------------ links

    def _link(self, stage: int) -> Iterator[tuple[tuple[int, int], LinkTimes]]:
        """Exchange messages over the boundary after ``stage``; only its first end has the figures."""
        ranks = self._placement.pipes[0][stage : stage + 2]
        if self.rank not in ranks:
            return
        self._doing = f"exchanging messages between the ranks {ranks[0]} and {ranks[1]}"
        sizes = _SMALL_BYTES, _large_bytes(self._sample)
        small, large = (self._exchange(stage, size, first=self.rank == ranks[0]) for size in sizes)
        if self.rank == ranks[0]:
            yield (ranks[0], ranks[1]), LinkTimes(ranks=(ranks[0], ranks[1]), small=small, large=large, large_bytes=sizes[1])

    def _exchange(self, stage: int, size: int, *, first: bool) -> float:
        """Send a message of ``size`` bytes there and back, again and again; returns the median seconds of one way."""
        there, arriving, back, returned = (channel(*end, self._placement) for end in _ends(stage, self._placement))
        device = next((tensor.device for tensor in self._sample.inputs), torch.device("cpu"))
        message, key, metas = torch.zeros(size, dtype=torch.uint8, device=device), _key(stage), (_meta(size),)
        taken = []
        for _ in range(_times(self._sample)):
            start = now()
            if first:
                self._transport.send(there, key, [message], metas)
            self._arrive(returned if first else arriving, key)
            if not first:
                self._transport.send(back, key, [message], metas)
            taken.append((now() - start) / 2)
        return statistics.median(taken[1:])

    def _arrive(self, source: Channel, key: Key) -> None:
        (message,) = self._mailbox.take(source, key, f"rank {self.rank}, {self._doing},")
        if message is not None and self._transport.shares_memory:
            message.clone()  # as a stage does, which may write into what it receives

    # ------------------------------------------------------------------ details

    def _expected(self) -> Iterator[Expected]:
        """All messages that will arrive, in the order of each channel."""
        for stage in boundaries(self._placement):
            for size in (_SMALL_BYTES, _large_bytes(self._sample)):
                for action, rank in _ends(stage, self._placement):
                    if rank == self.rank and action.kind.is_recv:
                        one = Expected(channel(action, rank, self._placement), _key(stage), (_meta(size),))
                        yield from [one] * _times(self._sample)
        ends = [end for stage in range(self._last) for end in _ends(stage, self._placement) if end[0].kind.is_recv]
        down, up = ([end for end in ends if end[0].kind is kind] for kind in (Kind.RECV_F, Kind.RECV_B))
        for action, rank in (*down, *reversed(up)):
            if rank == self.rank and (metas := self._metas(action)):
                yield Expected(channel(action, rank, self._placement), Key.of(action), metas)

    @property
    def _microbatch(self) -> int:
        """Names the messages, and the pipe that they go along."""
        return self._placement.microbatches(0)[0]

    @property
    def _last(self) -> int:
        return self._placement.num_stages - 1


def _large_bytes(sample: Sample) -> int:
    """The largest boundary's bytes, where that is enough to tell a bandwidth, and not so much that it takes long."""
    sent = [stage.sent_bytes for stage in sample.program.plan.stages]
    return min(max(*sent, _LEAST_LARGE), _MOST_LARGE)


def _times(sample: Sample) -> int:
    """How often each message goes there and back; messages are quick, and a busy moment is long for them."""
    return 4 * sample.rounds + 1


def _key(stage: int) -> Key:
    return Key(0, stage, -1)


def _meta(size: int) -> TensorMeta:
    return TensorMeta((size,), (1,), torch.uint8, False)


def _present(payload: Payload) -> list[torch.Tensor]:
    values = [tensor for tensor in payload if tensor is not None]
    assert len(values) == len(payload), "a stage sent nothing where its recording has a value"
    return values
