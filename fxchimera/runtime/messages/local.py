"""Ranks as threads of one process: messages are the tensors themselves, handed over through queues."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence

from fxchimera.errors import PipelineError
from fxchimera.runtime.failures.failure import Failure
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.transport import Channel, Expected
from fxchimera_passes.captured import TensorMeta

__all__ = ["LocalTransport"]


class LocalTransport:
    """The queues of all channels; one object serves every rank of the process."""

    shares_memory = True

    def __init__(self, channels: Iterable[Channel], failure: Failure) -> None:
        self._failure = failure
        self._awaited = {channel: failure.message(*channel[:2]) for channel in channels}
        self._queues: dict[Channel, queue.SimpleQueue[tuple[Key, Payload]]] = {c: queue.SimpleQueue() for c in self._awaited}

    def post(self, expected: Sequence[Expected]) -> None:
        """Nothing to prepare: a queue takes what comes."""

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Put the tensors into the channel's queue."""
        self._queues[channel].put((key, [None if tensor is None else tensor.detach() for tensor in payload]))

    def has(self, channel: Channel) -> bool:
        """Whether the channel holds a message."""
        return not self._queues[channel].empty()

    def receive(self, channel: Channel, key: Key, what: object) -> Payload:
        """Take the next message of the channel."""
        found, payload = self._failure.wait(self._queues[channel], what, self._awaited[channel])
        if found != key:
            raise PipelineError(f"{what}: expected {key}, but {found} arrived in its place")
        return payload

    def close(self) -> None:
        """Nothing to release."""
