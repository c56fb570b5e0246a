"""Ranks as processes: every channel is a two-rank gloo group with a helper thread at each end.

gloo cannot be polled, and a short wait kills the connection, so the blocking calls are made by helper threads and the rank's
own thread waits on queues.  Sends and receives never share a group, and flows never share one either: with one group for both
directions messages were delivered to the wrong consumer without any error.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxchimera.errors import PipelineError
from fxchimera.runtime.failure import Cause, Failure
from fxchimera.runtime.message import Key, Payload, message_bytes, pack, unpack
from fxchimera.runtime.transport import Channel, Expected
from fxchimera.runtime.world import resolve_cause
from fxchimera_passes.captured import TensorMeta

__all__ = ["DistributedTransport"]

_JOIN_SECONDS = 2.0


class _Sender(threading.Thread):
    """Sends the buffers of one channel, in order; a buffer lives until its send is done."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup, failure: Failure) -> None:
        super().__init__(name=f"fxchimera-send-{channel}", daemon=True)
        self.outgoing: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()
        self._channel, self._group, self._failure = channel, group, failure

    def run(self) -> None:
        try:
            while (item := self.outgoing.get()) is not None:
                tag, buffer = item
                dist.send(buffer, self._channel[1], group=self._group, tag=tag)
        except Exception as error:
            _broken(self._failure, self._channel[1], f"rank {self._channel[0]} could not send to it: {error}")


class _Receiver(threading.Thread):
    """Receives the announced messages of one channel, in order, ahead of the computes that need them."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup, failure: Failure) -> None:
        super().__init__(name=f"fxchimera-recv-{channel}", daemon=True)
        self.announced: queue.SimpleQueue[Expected | None] = queue.SimpleQueue()
        self.arrived: queue.SimpleQueue[tuple[Expected, torch.Tensor]] = queue.SimpleQueue()
        self._channel, self._group, self._failure = channel, group, failure

    def run(self) -> None:
        try:
            while (expected := self.announced.get()) is not None:
                buffer = torch.empty(message_bytes(expected.metas), dtype=torch.uint8)
                dist.recv(buffer, self._channel[0], group=self._group, tag=_tag(expected.key))
                self.arrived.put((expected, buffer))
        except Exception as error:
            _broken(self._failure, self._channel[0], f"rank {self._channel[1]} could not receive from it: {error}")


class DistributedTransport:
    """The helper threads of one rank's channels.

    All ranks must construct it at the same time with the same ``channels``: groups are made, and each is used once, in one
    global order.
    """

    shares_memory = False

    def __init__(self, rank: int, channels: Sequence[Channel], failure: Failure) -> None:
        self._failure = failure
        self._senders: dict[Channel, _Sender] = {}
        self._receivers: dict[Channel, _Receiver] = {}
        timeout = datetime.timedelta(seconds=failure.limits.wait_seconds)
        for channel in channels:
            group = dist.new_group(sorted(channel[:2]), timeout=timeout, backend="gloo")
            if rank == channel[0]:
                dist.send(torch.zeros(1, dtype=torch.uint8), channel[1], group=group)
                self._senders[channel] = _Sender(channel, group, failure)
            elif rank == channel[1]:
                dist.recv(torch.zeros(1, dtype=torch.uint8), channel[0], group=group)
                self._receivers[channel] = _Receiver(channel, group, failure)
        for thread in self._threads:
            thread.start()

    @property
    def _threads(self) -> list[_Sender | _Receiver]:
        return [*self._senders.values(), *self._receivers.values()]

    def post(self, expected: Sequence[Expected]) -> None:
        """Start receiving the announced messages."""
        for message in expected:
            self._receivers[message.channel].announced.put(message)

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Pack the tensors now, so that the caller may change them, and send them in the background."""
        self._senders[channel].outgoing.put((_tag(key), pack(key, payload, metas)))

    def receive(self, channel: Channel, key: Key, what: str) -> Payload:
        """Wait for the next message of the channel and unpack it."""
        expected, buffer = self._failure.wait(self._receivers[channel].arrived, what)
        if expected.key != key:
            raise PipelineError(f"{what}: expected {key}, but {expected.key} was announced in its place")
        return unpack(key, buffer, expected.metas)

    def close(self) -> None:
        """Let every helper finish what it has and end; one that hangs in a broken connection is left behind."""
        for sender in self._senders.values():
            sender.outgoing.put(None)
        for receiver in self._receivers.values():
            receiver.announced.put(None)
        if self._failure.cause is None:
            for thread in self._threads:
                thread.join(timeout=_JOIN_SECONDS)


def _tag(key: Key) -> int:
    """A tag that gloo accepts (31 bits); unique within a channel and step."""
    return (key.stage << 16 | (key.microbatch + 1)) & 0x7FFFFFFF


def _broken(failure: Failure, peer: int, text: str) -> None:
    resolve_cause(failure, Cause(peer, f"the connection broke; {text}"))
