"""Messages between processes whose tensors stay on their device: torch's process groups carry them, sockets announce them.

    source, compute        ... F --- event
    source, channel                 `-- wait  pack  isend ..........     host: "it is on its way: identity, which tensors, strides"
    destination, channel                             irecv --- event     host: has read that
    destination, compute                                      `-- wait  F ...

A receive is queued when its announcement is there, so never for a message that is not on its way: no kernel of a backend spins
for what is still to be computed, a rank can ask cheaply whether a message has come, hosts wait for hosts with a bound and not for
devices, and an identity that is not the expected one is an error without a read from a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fxchimera.errors import PipelineError
from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.devices.streams import is_host
from fxchimera.runtime.failures.failure import Failure
from fxchimera.runtime.failures.sharedfailure import resolve_cause
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.messages.cargo import Cargo
from fxchimera.runtime.messages.links import Link, Links
from fxchimera.runtime.transport import Channel, Expected, Transport
from fxchimera_passes.captured import TensorMeta

__all__ = ["GroupTransport"]

_HOST = torch.device("cpu")


class _End:
    """One end of a channel: its link, and on an accelerator its stream."""

    def __init__(self, channel: Channel, link: Link, lane: Lane | None) -> None:
        self.channel, self.link, self.lane = channel, link, lane
        self.device = _HOST if lane is None else lane.device
        if lane is not None:
            self.stream = lane.accelerator.stream(lane.device)
            lane.streams.append(self.stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let this thread's operations go to the channel's stream, which is where a group queues its own behind."""
        if self.lane is None:
            yield
            return
        self.lane.accelerator.use(self.stream)
        try:
            yield
        finally:
            self.lane.accelerator.use(self.lane.compute)

    def buffer(self, size: int) -> torch.Tensor:
        """Memory for one message, made on the current stream."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)


class _Outgoing(_End):
    """The sending end; keeps what is on its way, at most ``room`` messages, by which time the proof has the oldest received."""

    def __init__(self, channel: Channel, link: Link, lane: Lane | None, room: int | None) -> None:
        super().__init__(channel, link, lane)
        self._room = room
        self._going: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, payload: Payload, words: Sequence[int], cargo: Cargo) -> None:
        """Copy the tensors, which the caller may change then, and begin to send the copy."""
        self.settle(self._room)
        lane = self.lane
        if lane is not None:
            lane.accelerator.wait(self.stream, lane.accelerator.event(lane.compute))
        with self.current():
            begun = None if lane is None else lane.accelerator.event(self.stream, timed=True)
            buffer = self.buffer(cargo.bytes)
            cargo.pack(payload, words, buffer)
            if lane is not None and begun is not None:
                lane.carried = begun, lane.accelerator.event(self.stream, timed=True)
            self._going.append((self.link.send(buffer), buffer))
        if lane is not None:
            for tensor in payload:
                if tensor is not None and not is_host(tensor.device):
                    lane.accelerator.keep(tensor, self.stream)

    def settle(self, room: int | None) -> None:
        """Let go of buffers that have been sent, and wait (a stream, or on the CPU the host) while more than ``room`` have not."""
        while self._going and self._going[0][0].is_completed():
            self._going.popleft()
        with self.current():
            while room is not None and len(self._going) > room:
                work, _ = self._going.popleft()
                work.wait()


@dataclass(frozen=True, slots=True)
class _Coming:
    """A message on its way: the work that receives it on the CPU, or the event after which a device has it."""

    expected: Expected
    cargo: Cargo
    words: list[int]
    buffer: torch.Tensor
    work: dist.Work | None
    arrived: torch.Event | None


class _Incoming(_End):
    """The receiving end: messages of which nothing is known yet, and those on their way."""

    def __init__(self, channel: Channel, link: Link, lane: Lane | None) -> None:
        super().__init__(channel, link, lane)
        self.due: deque[Expected] = deque()
        self.coming: deque[_Coming] = deque()

    def begin(self, words: list[int]) -> None:
        """Begin to receive the next message, which has been announced."""
        expected, arrived, work = self.due.popleft(), None, None
        cargo = Cargo(expected.metas)
        with self.current():
            buffer = self.buffer(cargo.bytes)
            work = self.link.receive(buffer)
            if self.lane is not None:
                work.wait()  # the stream; the host goes on
                arrived, work = self.lane.accelerator.event(self.stream), None
        self.coming.append(_Coming(expected, cargo, words, buffer, work, arrived))

    def take(self) -> Payload:
        """Return the tensors of the next message; the host waits until they are there, or lets the rank's stream do so."""
        coming, lane = self.coming.popleft(), self.lane
        if coming.work is not None:
            coming.work.wait()
        if lane is not None and coming.arrived is not None:
            lane.accelerator.wait(lane.compute, coming.arrived)
            lane.accelerator.keep(coming.buffer, lane.compute)
        return coming.cargo.unpack(coming.words, coming.buffer)


class GroupTransport:
    """The ends of one rank's channels.

    On an accelerator no call waits for a device.  On the CPU, where this is for tests, a rank that waits for a peer which was
    frozen in the middle of a message notices that after ``wait_seconds``.

    Args:
        rank: This rank.
        channels: All channels of all ranks.
        sockets: What the announcements go by; closed with this.
        links: The groups of the channels; closed with this.
        lane: The rank's streams; None on the CPU.
        failure: Where a broken group is reported.
        room: By channel, the most messages that are ever on the way or looked at by the receiver, from the proof of the order.
    """

    shares_memory = False

    def __init__(
        self,
        rank: int,
        channels: Sequence[Channel],
        sockets: Transport,
        links: Links,
        lane: Lane | None,
        failure: Failure,
        room: Mapping[Channel, int] = MappingProxyType({}),
    ) -> None:
        self._sockets, self._links, self._failure = sockets, links, failure
        self._outgoing = {c: _Outgoing(c, links[c], lane, room.get(c)) for c in channels if c[0] == rank}
        self._incoming = {c: _Incoming(c, links[c], lane) for c in channels if c[1] == rank}

    def post(self, expected: Sequence[Expected]) -> None:
        """Announce the messages of a job; those of earlier jobs have been received everywhere."""
        for end in self._outgoing.values():
            with self._named(end.channel, end.channel[1]):
                end.settle(0)
        self._sockets.post([Expected(one.channel, one.key, Cargo(one.metas).words) for one in expected])
        for one in expected:
            self._incoming[one.channel].due.append(one)

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Begin to send copies of the tensors, and tell the receiver.

        Raises:
            PipelineError: The group or the connection is broken, a tensor is not as agreed, or another rank has failed.
        """
        self._failure.check()
        cargo = Cargo(metas)
        words = cargo.describe(key, payload)
        with self._named(channel, channel[1]):
            self._outgoing[channel].send(payload, words, cargo)
        self._sockets.send(channel, key, [torch.tensor(words, dtype=torch.int64, device="cpu")], cargo.words)
        self._receive_ahead()

    def has(self, channel: Channel) -> bool:
        """Whether the next message of the channel is on its way, so that its receiver's host need not wait for its sender's."""
        return bool(self._incoming[channel].coming) or self._sockets.has(channel)

    def receive(self, channel: Channel, key: Key, what: object) -> Payload:
        """Wait until the next message of the channel is on its way, and return its tensors; on an accelerator, in the making."""
        end = self._incoming[channel]
        if not end.coming:
            self._begin(end, what)
        expected = end.coming[0].expected
        if expected.key != key:
            raise PipelineError(f"{what}: expected {key}, but {expected.key} was announced in its place")
        with self._named(channel, channel[0]):
            payload = end.take()
        self._receive_ahead()
        return payload

    def close(self) -> None:
        """Close the connections and the groups; may be called more than once."""
        self._sockets.close()
        self._links.close()

    def _begin(self, end: _Incoming, what: object) -> None:
        (words,) = self._sockets.receive(end.channel, end.due[0].key, what)
        assert words is not None
        with self._named(end.channel, end.channel[0]):
            end.begin(words.tolist())

    def _receive_ahead(self) -> None:
        """Begin to receive what has been announced meanwhile, so that it comes while this rank computes."""
        for end in self._incoming.values():
            while end.due and self._sockets.has(end.channel):
                self._begin(end, end.channel)

    @contextmanager
    def _named(self, channel: Channel, peer: int) -> Iterator[Any]:
        """Name the cause behind an error of torch's on a channel."""
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            cause = self._failure.cause_at(peer, f"the group of channel {channel} broke: {error}")
            raise resolve_cause(self._failure, cause).error() from error
