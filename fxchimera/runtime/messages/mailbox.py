"""What has arrived for one rank and is not wanted yet.

The messages of a channel arrive in the order in which they are sent, which is the order of the receives in the rank's list.  The
computations that want them may be in another order: a searched schedule may run the input part of micro-batch 1 before that of
micro-batch 0 although both gradients are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.transport import Channel, Expected, Transport

__all__ = ["Mailbox"]


class Mailbox:
    """The messages that a rank expects in one job; posts their receives at once."""

    def __init__(self, transport: Transport, expected: Sequence[Expected]) -> None:
        self._transport = transport
        self._coming: dict[Channel, deque[Key]] = {}
        self._here: dict[tuple[Channel, Key], Payload] = {}
        for one in expected:
            self._coming.setdefault(one.channel, deque()).append(one.key)
        transport.post(expected)

    def take(self, channel: Channel, key: Key, what: object) -> Payload:
        """Wait for a message, given its channel, and return it; ``what`` says in an error which one was waited for.

        Raises:
            PipelineError: It did not come in time, or another rank failed.
        """
        coming = self._coming[channel]
        if coming and (coming[0] is key or coming[0] == key):
            return self._transport.receive(channel, coming.popleft(), what)
        while (channel, key) not in self._here:
            first = coming.popleft()
            self._here[channel, first] = self._transport.receive(channel, first, what)
        return self._here.pop((channel, key))
