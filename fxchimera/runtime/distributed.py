"""Ranks as processes: every channel is a two-rank gloo group with a helper thread at each end.

    rank's thread    pack, start the send        ...compute...                     take from the queue
    helper           wait for it, let the buffer go        receives started ahead, waited for one by one

gloo cannot be polled, and a short wait kills the connection, so helper threads wait, and the rank's own thread waits on queues.
It starts its sends itself: a helper would have to wait for the interpreter, which the rank's thread keeps until its next
kernel.  Receives are started ahead, because gloo moves a message for which no receive is started only after asking.  Sends and
receives never share a group, and flows never share one either: with one group for both directions messages were delivered to the
wrong consumer without any error.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fxchimera.errors import PipelineError
from fxchimera.runtime.failure import Cause, Failure
from fxchimera.runtime.groups import Group, connect, open_devices
from fxchimera.runtime.message import Key, Parcel, Payload
from fxchimera.runtime.receivepool import ReceivePool
from fxchimera.runtime.sharedfailure import SharedFailure, resolve_cause
from fxchimera.runtime.transport import Channel, Expected
from fxchimera_passes.captured import TensorMeta

__all__ = ["DistributedTransport"]

_CLOSE_SECONDS = 5.0
_JOIN_SECONDS = 0.05
_RARE = ("P", "G")  # flows of few large messages, for which no buffer is kept
_UNWATCHED = 4  # sends of a channel that nobody waits for yet
_STAND_BACK_SECONDS = 0.0003  # the rank's thread wakes and takes the interpreter, before a helper goes on to the next message
_AHEAD = 2  # receives of a channel that are started and not done: the next one is there while a message is handed over


class _Helper(threading.Thread):
    """Waits at one end of a channel; ``tasks`` ends with None.

    When it has ended, its group is destroyed.  That closes the connection and so releases the helper at the other end, if that
    one is blocked: of the two ends of a channel at most one can be, since two that are would have met.
    """

    def __init__(self, channel: Channel, group: Group, failure: Failure, peer: int) -> None:
        super().__init__(name=f"fxchimera-{channel}", daemon=True)
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.channel, self.group = channel, group
        self.other = 1 - group.rank()
        self._failure, self._peer = failure, peer

    def run(self) -> None:
        try:
            self.serve()
        except Exception as error:
            self.broken(error)

    def serve(self) -> None:
        """Do every task, until there is none any more."""
        raise TypeError(f"{type(self).__name__} does not say how")

    def broken(self, error: Exception) -> Cause:
        """Return the cause behind an error of gloo's."""
        return resolve_cause(self._failure, Cause(self._peer, f"the connection on channel {self.channel} broke: {error}"))


class _Sender(_Helper):
    """Waits for the sends of one channel, in order; a buffer is left alone until its send is done, and then used again."""

    def __init__(self, channel: Channel, group: Group, failure: Failure, peer: int) -> None:
        super().__init__(channel, group, failure, peer)
        self._unwatched: list[tuple[dist.Work, Parcel]] = []
        self._left: list[tuple[dist.Work, Parcel]] = []
        kept = _UNWATCHED if channel[2] not in _RARE else 0
        self._free: deque[Parcel] = deque(maxlen=kept)

    def send(self, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Start a send, on the caller's thread.

        Raises:
            PipelineError: The connection is broken, or the payload is not what ``metas`` say.
        """
        parcel = self._free.popleft() if self._free else None
        if parcel is None or parcel.metas != metas:
            parcel = Parcel(metas)
        parcel.fill(key, payload)
        try:
            work = self.group.send([parcel.buffer], self.other, _tag(key))
        except Exception as error:
            raise self.broken(error).error() from error
        self._unwatched.append((work, parcel))
        if len(self._unwatched) >= _UNWATCHED:
            self.watch()

    def watch(self) -> None:
        """Give the helper what was started; waking it costs the caller's thread some of the interpreter's time."""
        unwatched, self._unwatched = self._unwatched, []
        for task in unwatched:
            self.tasks.put(task)

    def serve(self) -> None:
        while (task := self.tasks.get()) is not None:
            if self._failure.cause is None:
                task[0].wait()
                self._free.append(task[1])
            else:
                self._left.append(task)  # gloo may read from the buffer until the group is destroyed
            del task  # a waiting thread keeps no buffer alive


class _Receiver(_Helper):
    """Receives the announced messages of one channel, in order, ahead of the computes that need them."""

    def __init__(self, channel: Channel, group: Group, failure: Failure, peer: int, room: int) -> None:
        super().__init__(channel, group, failure, peer)
        self.pool = ReceivePool(room + _AHEAD if channel[2] not in _RARE else 0)
        self.arrived: queue.SimpleQueue[tuple[Expected, torch.Tensor]] = queue.SimpleQueue()
        self._begun: deque[tuple[Expected, torch.Tensor, dist.Work]] = deque()

    def serve(self) -> None:
        while self._begin_ahead():
            expected, buffer, work = self._begun[0]  # stays there: after a failure gloo may still write into it
            work.wait()
            self.arrived.put((expected, buffer))
            time.sleep(_STAND_BACK_SECONDS)
            self._begun.popleft()
            del expected, buffer, work

    def _begin_ahead(self) -> bool:
        """Begin the next receives, and wait for a task when there is none to wait for; False at the end."""
        while len(self._begun) < _AHEAD:
            try:
                task = self.tasks.get(block=not self._begun)
            except queue.Empty:
                break
            if task is None:
                return False
            if self._failure.cause is None:
                buffer = self.pool.take(task.form.bytes)
                work = self.group.recv([buffer], self.other, _tag(task.key))
                self._begun.append((task, buffer, work))
        return True


class DistributedTransport:
    """The helper threads of one rank's channels.

    All ranks must construct it at the same time with the same ``channels``: groups are made, and each is used once, in one
    global order.

    Args:
        rank: This rank.
        channels: All channels of all ranks.
        failure: Where a broken connection is reported.
        room: By channel, the most messages that are ever on the way or looked at by the receiver, from the proof of the order.
    """

    shares_memory = False

    def __init__(
        self, rank: int, channels: Sequence[Channel], failure: Failure, room: Mapping[Channel, int] = MappingProxyType({})
    ) -> None:
        self._failure = failure
        self._senders: dict[Channel, _Sender] = {}
        self._receivers: dict[Channel, _Receiver] = {}
        timeout = datetime.timedelta(seconds=failure.limits.wait_seconds)
        assert isinstance(failure, SharedFailure), "processes share their failures"
        name = f"transport {failure.store.add(f'transports of rank {rank}', 1)}"
        devices = open_devices()
        for channel in channels:
            if rank not in channel[:2]:
                continue
            group = connect(failure.store, f"{name}/{channel}", rank, channel[:2], devices, timeout)
            first = [torch.zeros(1, dtype=torch.uint8)]
            if rank == channel[0]:
                group.send(first, 1 - group.rank(), 0).wait()
                self._senders[channel] = _Sender(channel, group, failure, channel[1])
            else:
                group.recv(first, 1 - group.rank(), 0).wait()
                self._receivers[channel] = _Receiver(channel, group, failure, channel[0], room.get(channel, 0))
        for helper in (*self._senders.values(), *self._receivers.values()):
            helper.start()

    def post(self, expected: Sequence[Expected]) -> None:
        """Start receiving the announced messages."""
        self._watch()
        for message in expected:
            self._receivers[message.channel].tasks.put(message)

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Pack the tensors, so that the caller may change them, and start to send them.

        Raises:
            PipelineError: The connection is broken, or another rank has failed.
        """
        self._failure.check()
        self._senders[channel].send(key, payload, metas)

    def receive(self, channel: Channel, key: Key, what: object) -> Payload:
        """Wait for the next message of the channel and unpack it."""
        arrived = self._receivers[channel].arrived
        if arrived.empty():  # there is time
            self._watch()
        expected, buffer = self._failure.wait(arrived, what)
        if expected.key != key:
            raise PipelineError(f"{what}: expected {key}, but {expected.key} was announced in its place")
        return expected.form.unpack(key, buffer)

    def close(self) -> None:
        """Let every helper finish what it has and end, and destroy the groups."""
        helpers: list[_Helper] = [*self._senders.values(), *self._receivers.values()]
        self._watch()
        self._senders, self._receivers = {}, {}
        for helper in helpers:
            helper.tasks.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while helpers and time.monotonic() < deadline:
            for helper in list(helpers):
                helper.join(timeout=_JOIN_SECONDS)
                if not helper.is_alive():
                    del helper.group
                    helpers.remove(helper)

    def _watch(self) -> None:
        for sender in self._senders.values():
            sender.watch()


def _tag(key: Key) -> int:
    """A tag that gloo accepts (31 bits); unique within a channel and step."""
    return (key.stage << 16 | (key.microbatch + 1)) & 0x7FFFFFFF
