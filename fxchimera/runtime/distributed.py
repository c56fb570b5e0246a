"""Ranks as processes: every channel is a two-rank gloo group with a helper thread at each end.

gloo cannot be polled, and a short wait kills the connection, so the blocking calls are made by helper threads and the rank's
own thread waits on queues.  Sends and receives never share a group, and flows never share one either: with one group for both
directions messages were delivered to the wrong consumer without any error.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxchimera.errors import PipelineError
from fxchimera.runtime.failure import Cause, Failure
from fxchimera.runtime.groups import destroy
from fxchimera.runtime.message import Key, Payload, message_bytes, pack, unpack
from fxchimera.runtime.sharedfailure import resolve_cause
from fxchimera.runtime.transport import Channel, Expected
from fxchimera_passes.captured import TensorMeta

__all__ = ["DistributedTransport"]

_CLOSE_SECONDS = 5.0
_JOIN_SECONDS = 0.05


class _Helper(threading.Thread):
    """Makes the blocking calls of one end of a channel; ``tasks`` ends with None.

    When it has ended, its group is destroyed.  That closes the connection and so releases the helper at the other end, if that
    one is blocked: of the two ends of a channel at most one can be, since two that are would have met.
    """

    def __init__(self, channel: Channel, group: dist.ProcessGroup, failure: Failure, peer: int) -> None:
        super().__init__(name=f"fxchimera-{channel}", daemon=True)
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.channel, self.group, self.peer = channel, group, peer
        self._failure = failure

    def run(self) -> None:
        try:
            while (task := self.tasks.get()) is not None:
                if self._failure.cause is None:
                    self.handle(task)
        except Exception as error:
            cause = Cause(self.peer, f"the connection on channel {self.channel} broke: {error}")
            resolve_cause(self._failure, cause)

    def handle(self, task: Any) -> None:
        """Do one blocking call."""
        raise TypeError(f"{type(self).__name__} does not say how")


class _Sender(_Helper):
    """Sends the buffers of one channel, in order; a buffer lives until its send is done."""

    def handle(self, task: tuple[int, torch.Tensor]) -> None:
        tag, buffer = task
        dist.send(buffer, self.peer, group=self.group, tag=tag)


class _Receiver(_Helper):
    """Receives the announced messages of one channel, in order, ahead of the computes that need them."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup, failure: Failure, peer: int) -> None:
        super().__init__(channel, group, failure, peer)
        self.arrived: queue.SimpleQueue[tuple[Expected, torch.Tensor]] = queue.SimpleQueue()

    def handle(self, task: Expected) -> None:
        buffer = torch.empty(message_bytes(task.metas), dtype=torch.uint8)
        dist.recv(buffer, self.peer, group=self.group, tag=_tag(task.key))
        self.arrived.put((task, buffer))


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
                self._senders[channel] = _Sender(channel, group, failure, channel[1])
            elif rank == channel[1]:
                dist.recv(torch.zeros(1, dtype=torch.uint8), channel[0], group=group)
                self._receivers[channel] = _Receiver(channel, group, failure, channel[0])
        for helper in (*self._senders.values(), *self._receivers.values()):
            helper.start()

    def post(self, expected: Sequence[Expected]) -> None:
        """Start receiving the announced messages."""
        for message in expected:
            self._receivers[message.channel].tasks.put(message)

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Pack the tensors now, so that the caller may change them, and send them in the background."""
        self._senders[channel].tasks.put((_tag(key), pack(key, payload, metas)))

    def receive(self, channel: Channel, key: Key, what: str) -> Payload:
        """Wait for the next message of the channel and unpack it."""
        expected, buffer = self._failure.wait(self._receivers[channel].arrived, what)
        if expected.key != key:
            raise PipelineError(f"{what}: expected {key}, but {expected.key} was announced in its place")
        return unpack(key, buffer, expected.metas)

    def close(self) -> None:
        """Let every helper finish what it has and end, and destroy the groups."""
        helpers: list[_Helper] = [*self._senders.values(), *self._receivers.values()]
        self._senders, self._receivers = {}, {}
        for helper in helpers:
            helper.tasks.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while helpers and time.monotonic() < deadline:
            for helper in list(helpers):
                helper.join(timeout=_JOIN_SECONDS)
                if not helper.is_alive():
                    destroy(helper.group)
                    del helper.group
                    helpers.remove(helper)


def _tag(key: Key) -> int:
    """A tag that gloo accepts (31 bits); unique within a channel and step."""
    return (key.stage << 16 | (key.microbatch + 1)) & 0x7FFFFFFF
