"""Exchanges among the members of a group, each with each, on connections of their own.

The sum of a buffer over the members is made in two rounds:

    round 1   part i of everybody's buffer goes to member i, which adds the parts, member 0's first
    round 2   member i sends its sum to everybody

Every value is summed once, by one member, in one order whatever the number of members: all members end with the same bits, and a
plain loop over the members' buffers gives them, too.  As many bytes travel as in a ring, 2 (size - 1) / size of the buffer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxchimera.runtime.processes.groups import Group

__all__ = ["Circle", "sum_by_parts"]

Swap = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Circle:
    """The members of ``group``, of which every one makes the same calls in the same order, on one thread."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._calls = 0
        self.index, self.size = group.rank(), group.size()

    def sum(self, buffer: torch.Tensor) -> None:
        """Replace a flat CPU buffer, whose length is a multiple of the number of members, by the sum over all members."""
        sum_by_parts(buffer, self.index, self.size, self._swap)

    def gather(self, value: Any) -> list[Any]:
        """Return every member's object (pickled on the way), by member."""
        own = _pickled(value)
        sizes = [torch.tensor([own.numel()], device="cpu") for _ in range(self.size)]
        self._swap([sizes[self.index]] * self.size, sizes)
        pickles = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
        self._swap([own] * self.size, pickles)
        return [value if i == self.index else pickle.loads(found.numpy().data) for i, found in enumerate(pickles)]

    def spread(self, value: Any) -> Any:
        """Return member 0's object on every member."""
        found = self.gather(value if self.index == 0 else None)
        return found[0]

    def spread_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor by member 0's, which has its shape and dtype."""
        dense = tensor.detach().to("cpu").contiguous()
        others = range(1, self.size)
        if self.index == 0:
            self._wait([self._group.send([dense], other, self._calls) for other in others])
        else:
            self._wait([self._group.recv([dense], 0, self._calls)])
            tensor.detach().copy_(dense)

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to member i and receive ``incoming[i]`` from it, for all others."""
        others = [other for other in range(self.size) if other != self.index]
        works = [self._group.recv([incoming[other]], other, self._calls) for other in others]
        works += [self._group.send([outgoing[other]], other, self._calls) for other in others]
        self._wait(works)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()
        self._calls = (self._calls + 1) & 0x7FFFFFFF  # the tag of the next call: a member that is ahead disturbs nobody


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def sum_by_parts(buffer: torch.Tensor, own: int, size: int, swap: Swap) -> None:
    """Sum a flat buffer over ``size`` members in two rounds: each adds up one part, 0's first, and gives it to all others.

    ``swap(outgoing, incoming)`` sends ``outgoing[i]`` to member i and receives ``incoming[i]`` from it, but for ``own``.
    """
    parts, received = list(buffer.view(size, -1)), list(torch.empty_like(buffer).view(size, -1))
    swap(parts, received)
    received[own].copy_(parts[own])
    total = received[0]
    for part in received[1:]:
        total.add_(part)
    parts[own].copy_(total)
    swap([total] * size, parts)
