"""Ranks as processes: every channel is a TCP connection, which the rank's own thread writes to and reads from.

    small message    written at once, read when it is wanted           no other thread takes part
    the rest         what the connection does not hold is written, and a large message is read ahead, by helper threads

So a message wakes one thread, the one that waits for it; and whoever waits does so in naps, between which it looks whether another
rank has failed.  A send never waits: what does not fit is left to the channel's helper, and later messages queue behind it.
Sends and receives never share a connection, and flows never share one either.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fxchimera.errors import PipelineError
from fxchimera.runtime.failures.failure import NAP_SECONDS, Cause, Failure
from fxchimera.runtime.failures.sharedfailure import SharedFailure, resolve_cause
from fxchimera.runtime.message import Key, Parcel, Payload
from fxchimera.runtime.messages.receivepool import Buffer, ReceivePool
from fxchimera.runtime.processes.wires import open_wires, read, read_soon, write
from fxchimera.runtime.transport import Channel, Expected
from fxchimera_passes.captured import TensorMeta

__all__ = ["DistributedTransport"]

_CLOSE_SECONDS = 5.0
_RARE = ("P", "G")  # flows of few large messages, for which no buffer is kept
_STAND_BACK_SECONDS = 0.0003  # the rank's thread wakes and takes the interpreter, before a helper goes on to the next message
_LARGE_BYTES = 1 << 18  # read ahead: from here on the copy out of the kernel takes longer than waking another thread


class _EndedError(Exception):
    """The transport is being closed, or another rank has failed: the helper has nothing more to do."""


class _End:
    """One end of a channel, and its helper thread, which is started when it first has something to do."""

    def __init__(self, channel: Channel, wire: socket.socket, failure: Failure, peer: int) -> None:
        self.wire = wire
        self._channel, self._failure, self._peer = channel, failure, peer
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = False

    def leave(self, task: Any) -> None:
        """Give the helper something to do."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"fxchimera-{self._channel}", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def end(self) -> None:
        """Tell the helper that there is nothing more to come."""
        self._ending = True
        self._tasks.put(None)

    def close(self, deadline: float) -> None:
        """Wait for the helper, and close the connection."""
        if self._thread is not None:
            self._thread.join(timeout=max(deadline - time.monotonic(), 0.0))
        self.wire.close()

    def serve(self, task: Any) -> None:
        """Do one task, on the helper's thread."""
        raise TypeError(f"{type(self).__name__} does not say how")

    def broken(self, error: Exception) -> Cause:
        """Return the cause behind an error of the connection."""
        text = f"the connection on channel {self._channel} broke: {error}"
        return resolve_cause(self._failure, self._failure.cause_at(self._peer, text))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self.serve(task)
            except _EndedError:
                return
            except OSError as error:
                self.broken(error)
                return
            del task  # a waiting thread keeps no buffer alive

    def _stop_after_failure(self) -> None:
        if self._failure.cause is not None:
            raise _EndedError


class _Outgoing(_End):
    """The sending end of a channel; a buffer is used again when it has been written.  ``made`` counts those that had to be made."""

    def __init__(self, channel: Channel, wire: socket.socket, failure: Failure, peer: int, room: int) -> None:
        super().__init__(channel, wire, failure, peer)
        wire.settimeout(0.0)
        self._free: deque[Parcel] = deque(maxlen=max(room, 1) if channel[2] not in _RARE else 0)
        self._left = self._written = 0  # to the helper, and by it
        self.made = 0

    def send(self, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Write a message as far as the connection holds it.

        Raises:
            PipelineError: The connection is broken, or the payload is not what ``metas`` say.
        """
        parcel = self._empty(metas)
        parcel.fill(key, payload)
        sent = 0
        if self._left == self._written:
            try:
                sent = self.wire.send(parcel.bytes)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self.broken(error).error() from error
            if sent == len(parcel.bytes):
                self._free.append(parcel)
                return
        self._left += 1
        self.leave((parcel, sent))

    def serve(self, task: Any) -> None:
        """Write the rest of a message."""
        parcel, sent = task
        with self.wire.dup() as wire:  # which waits, while the rank's thread does not
            wire.settimeout(NAP_SECONDS)
            write(wire, parcel.bytes[sent:], self._stop_after_failure)
        self._free.append(parcel)
        self._written += 1

    def _empty(self, metas: Sequence[TensorMeta]) -> Parcel:
        for _ in range(len(self._free)):
            parcel = self._free.popleft()
            if parcel.metas == metas:
                return parcel
            self._free.append(parcel)
        self.made += 1
        return Parcel(metas)


class _Incoming(_End):
    """The receiving end of a channel: the announced messages in order, large ones read ahead of the computes that need them."""

    def __init__(self, channel: Channel, wire: socket.socket, failure: Failure, peer: int, room: int) -> None:
        super().__init__(channel, wire, failure, peer)
        self._awaited = failure.message(*channel[:2])
        self.pool = ReceivePool(room + 1 if channel[2] not in _RARE else 0)
        self._due: deque[tuple[Expected, bool]] = deque()  # and whether the helper reads it
        self._arrived: queue.SimpleQueue[Buffer] = queue.SimpleQueue()

    def post(self, messages: Sequence[Expected]) -> None:
        """Announce messages; all are left to the helper if one of them is large, as only one thread may read at a time."""
        ahead = any(message.form.bytes >= _LARGE_BYTES for message in messages) and all(by_helper for _, by_helper in self._due)
        for message in messages:
            self._due.append((message, ahead))
            if ahead:
                self.leave(message)

    def has(self) -> bool:
        """Whether the next message, or its beginning, is there."""
        if self._due[0][1]:
            return not self._arrived.empty()
        poll = select.poll()
        poll.register(self.wire, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self, key: Key, what: object) -> Payload:
        """Return the next message.

        Raises:
            PipelineError: It is not ``key``, did not come in time, or another rank failed.
        """
        expected, ahead = self._due.popleft()
        if expected.key is not key and expected.key != key:
            raise PipelineError(f"{what}: expected {key}, but {expected.key} was announced in its place")
        buffer = self._failure.wait(self._arrived, what, self._awaited) if ahead else self._read_now(expected, what)
        return buffer.unpack(key, expected.form)

    def serve(self, task: Any) -> None:
        """Read one message ahead."""
        buffer = self.pool.take(task.form.bytes)
        read(self.wire, buffer.bytes, self._stop)
        self._arrived.put(buffer)
        time.sleep(_STAND_BACK_SECONDS)

    def _stop(self) -> None:
        self._stop_after_failure()
        if self._ending:
            raise _EndedError

    def _read_now(self, expected: Expected, what: object) -> Buffer:
        buffer = self.pool.take(expected.form.bytes)
        try:
            if left := read_soon(self.wire, buffer.bytes):
                with self._failure.patience(what, awaited=self._awaited) as between:
                    if len(left) == len(buffer.bytes):  # nothing came in the first nap
                        between()
                    read(self.wire, left, between)
        except OSError as error:
            raise self.broken(error).error() from error
        return buffer


class DistributedTransport:
    """The ends of one rank's channels.

    All ranks must construct it at the same time with the same ``channels``.

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
        assert isinstance(failure, SharedFailure), "processes share their failures"
        own = f"transports of pipeline {failure.grid.pipeline}"
        name = f"{own}/{failure.store.add(f'{own}, rank {rank}', 1)}"
        wires = open_wires(failure, name, rank, channels)
        self._outgoing = {
            channel: _Outgoing(channel, wire, failure, channel[1], room.get(channel, 0))
            for channel, wire in wires.items()
            if channel[0] == rank
        }
        self._incoming = {
            channel: _Incoming(channel, wire, failure, channel[0], room.get(channel, 0))
            for channel, wire in wires.items()
            if channel[1] == rank
        }

    def post(self, expected: Sequence[Expected]) -> None:
        """Announce messages, in the order of each channel."""
        by_channel: dict[Channel, list[Expected]] = {}
        for message in expected:
            by_channel.setdefault(message.channel, []).append(message)
        for channel, messages in by_channel.items():
            self._incoming[channel].post(messages)

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Pack the tensors, so that the caller may change them, and send them without waiting.

        Raises:
            PipelineError: The connection is broken, or another rank has failed.
        """
        self._failure.check()
        self._outgoing[channel].send(key, payload, metas)

    def has(self, channel: Channel) -> bool:
        """Whether the next message of the channel is there."""
        return self._incoming[channel].has()

    def receive(self, channel: Channel, key: Key, what: object) -> Payload:
        """Wait for the next message of the channel and unpack it."""
        return self._incoming[channel].receive(key, what)

    def close(self) -> None:
        """Let every helper finish what it has and end, and close the connections."""
        ends: list[_End] = [*self._outgoing.values(), *self._incoming.values()]
        self._outgoing, self._incoming = {}, {}
        for end in ends:
            end.end()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for end in ends:
            end.close(deadline)
