"""How messages move: the protocol that the executor uses, whatever carries them.

A channel is (source rank, destination rank, flow); messages of one channel arrive in the order they were sent.  The executor
posts a step's receives at its start, in the order in which the peer will send, and takes each message when a compute needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fxchimera.runtime.message import Form, Key, Payload
from fxchimera_passes.captured import TensorMeta

__all__ = ["Channel", "Expected", "Transport"]

Channel = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Expected:
    """A message that will arrive on ``channel``: its identity, the meta data of its tensors, and their form on the way."""

    channel: Channel
    key: Key
    metas: tuple[TensorMeta, ...]
    form: Form = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", Form(self.metas))


class Transport(Protocol):
    """Moves messages from and to one rank.

    ``shares_memory`` tells whether tensors arrive as the sender's own objects, so that a receiver that writes must copy.
    """

    shares_memory: bool

    def post(self, expected: Sequence[Expected]) -> None:
        """Announce the messages of a step, in the order of each channel."""

    def send(self, channel: Channel, key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> None:
        """Hand a message over; returns without waiting for the receiver."""

    def has(self, channel: Channel) -> bool:
        """Whether the next message of ``channel`` is there."""

    def receive(self, channel: Channel, key: Key, what: object) -> Payload:
        """Wait for the next message of ``channel``, which must be ``key``; ``what`` names who waits, for the error.

        Raises:
            PipelineError: Another rank failed, the wait's limit passed, or another message arrived.
        """

    def close(self) -> None:
        """Release threads and connections; may be called more than once."""
