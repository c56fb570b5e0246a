"""Messages between ranks that are threads and compute on accelerators: copies on the channel's own stream.

    compute of the source        ... F --- event
    channel                              `-- wait  copy --- event
    compute of the destination                            `-- wait  F ...

The host of neither rank waits: the queue hands over tensors that are still to be written, with the event that says when.  What
stays on its device is copied only if the receiver may write into it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.devices.lanes import Lane, Lanes
from fxchimera.runtime.devices.streams import is_host
from fxchimera.runtime.failures.failure import Failure
from fxchimera.runtime.failures.patience import Awaited
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.messages.local import LocalTransport
from fxchimera.runtime.transport import Channel, Expected, Transport
from fxchimera_passes.captured import TensorMeta

__all__ = ["LandingTransport", "StreamTransport", "landing", "local_transport"]

_Handed = tuple[Key, Payload, torch.Event]


class _Line:
    """One channel: its queue, and its stream on either device (the same one if both ranks share a device)."""

    def __init__(self, source: Lane, destination: Lane, awaited: Awaited, *, written: bool) -> None:
        self.source, self.destination = source, destination
        self.queue: queue.SimpleQueue[_Handed] = queue.SimpleQueue()
        self.awaited = awaited
        self.here = source.accelerator.stream(source.device)
        self.shared = source.device == destination.device
        self.there = self.here if self.shared else source.accelerator.stream(destination.device)
        self.copies = written or not self.shared
        source.streams.append(self.here)
        if not self.shared:
            destination.streams.append(self.there)

    def pass_on(self, payload: Payload) -> tuple[Payload, torch.Event]:
        """Bring tensors over, on the source's thread; returns them and the event after which they may be read."""
        accelerator = self.source.accelerator
        produced = accelerator.event(self.source.compute)
        detached = [None if tensor is None else tensor.detach() for tensor in payload]
        if not self.copies:
            return detached, produced
        accelerator.wait(self.here, produced)
        begun = accelerator.event(self.here, timed=True)
        with self._current():
            copied = [None if tensor is None else self._copy(tensor) for tensor in detached]
            arrived = accelerator.event(self.there)
        self.source.carried = begun, accelerator.event(self.here, timed=True)
        return copied, arrived

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_host(tensor.device):
            return tensor.clone(memory_format=torch.preserve_format)
        self.source.accelerator.keep(tensor, self.here)
        return tensor.to(self.destination.device, non_blocking=True, copy=True)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Copy on the channel's streams: torch copies on the present ones of both devices, each of which waits for the other."""
        accelerator = self.source.accelerator
        before = accelerator.current(self.destination.device)
        accelerator.use(self.there)
        accelerator.use(self.here)
        try:
            yield
        finally:
            accelerator.use(before)
            accelerator.use(self.source.compute)


class StreamTransport:
    """The lines of all channels; one object serves every rank of the process."""

    shares_memory = False

    def __init__(self, channels: Iterable[Channel], lanes: Lanes, failure: Failure) -> None:
        self._failure = failure
        self._lines = {c: _Line(lanes[c[0]], lanes[c[1]], failure.message(*c[:2]), written=c[2].endswith("F")) for c in channels}

    def post(self, expected: Sequence[Expected]) -> None:
        """Nothing to prepare: a queue takes what comes."""

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Copy the tensors and put the copies into the channel's queue."""
        line = self._lines[channel]
        line.queue.put((key, *line.pass_on(payload)))

    def has(self, channel: Channel) -> bool:
        """Whether the channel holds a message; perhaps it is still to be written."""
        return not self._lines[channel].queue.empty()

    def receive(self, channel: Channel, key: Key, what: object) -> Payload:
        """Take the next message of the channel; the rank's stream waits until it has been written."""
        line = self._lines[channel]
        found, payload, arrived = self._failure.wait(line.queue, what, line.awaited)
        if found != key:
            raise PipelineError(f"{what}: expected {key}, but {found} arrived in its place")
        accelerator, compute = line.destination.accelerator, line.destination.compute
        accelerator.wait(compute, arrived)
        for tensor in payload:
            if tensor is not None and not is_host(tensor.device):
                accelerator.keep(tensor, compute)
        return payload

    def close(self) -> None:
        """Nothing to release."""


class LandingTransport:
    """Messages between processes, which arrive in the host's memory, for a rank that computes on an accelerator.

    The host waits for what it sends and for what arrives to be copied, so this is for links that are slower than that.
    """

    shares_memory = False

    def __init__(self, inner: Transport, lane: Lane) -> None:
        self._inner, self._lane = inner, lane

    def post(self, expected: Sequence[Expected]) -> None:
        """Announce the messages."""
        self._inner.post(expected)

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Send what the rank's stream has computed by now; packing it waits for that."""
        self._inner.send(channel, key, payload, metas)

    def has(self, channel: Channel) -> bool:
        """Whether the next message is there."""
        return self._inner.has(channel)

    def receive(self, channel: Channel, key: Key, what: object) -> Payload:
        """Take the next message and copy it to the device; its buffer may be used again when that is done."""
        lane, payload = self._lane, self._inner.receive(channel, key, what)
        lane.accelerator.use(lane.inputs)
        try:
            landed = [None if tensor is None else tensor.to(lane.device) for tensor in payload]
            arrived = lane.accelerator.event(lane.inputs)
        finally:
            lane.accelerator.use(lane.compute)
        lane.accelerator.wait(lane.compute, arrived)
        for tensor in landed:
            if tensor is not None:
                lane.accelerator.keep(tensor, lane.compute)
        return landed

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


def landing(inner: Transport, lane: Lane | None) -> Transport:
    """Let messages between processes end where the rank computes."""
    return inner if lane is None else LandingTransport(inner, lane)


def local_transport(channels: Iterable[Channel], lanes: Lanes, failure: Failure) -> LocalTransport | StreamTransport:
    """What carries messages between ranks that are threads."""
    if lanes.devices.accelerator is None:
        return LocalTransport(channels, failure)
    return StreamTransport(channels, lanes, failure)
