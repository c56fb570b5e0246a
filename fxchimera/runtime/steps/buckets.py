"""Sum the gradients over the pipelines, in buckets that leave as soon as they are complete, while the pipeline still computes.

    1F0 1F1 ... 1B2 1B3            0B2 0B3
             last backward of stage 1 |
             the mirror's gradients   v
                       bucket [1] -------> sum over the pipelines, on a thread and connections of its own

What a bucket waits for follows from the order alone, so all pipelines have the same buckets.  They leave in one fixed sequence, by
the place of what they wait for last in the rank's list of actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from fxchimera.errors import PipelineError
from fxchimera.runtime.caller import Answer
from fxchimera.runtime.processes.width import Width
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.exchange import Exchange
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order

__all__ = ["Bucket", "Buckets", "Need", "Reduction", "buckets_of", "from_mirror", "from_own"]

_BUCKET_BYTES = 25 << 20  # as in torch's DistributedDataParallel

Need = tuple[str, int, int]  # what a gradient waits for: an own replica ("own", pipe, stage), or a mirror ("mirror", rank, stage)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one dtype, by name, whose gradients are complete at the same moment: when all ``needs`` are there."""

    names: tuple[str, ...]
    needs: frozenset[Need]


def from_own(pipe: int, stage: int) -> Need:
    """What the last backward of an own replica brings."""
    return ("own", pipe, stage)


def from_mirror(action: Action) -> Need:
    """What a RECV_G brings."""
    assert action.peer is not None
    return ("mirror", action.peer, action.stage)


def buckets_of(
    rank: int, order: Order, exchange: Exchange, replicas: Mapping[tuple[int, int], Replica], names: Iterable[str]
) -> tuple[Bucket, ...]:
    """Group the owned parameters ``names`` into buckets, in the sequence in which these leave."""
    places: dict[Need, int] = {}
    for place, action in enumerate(order.ranks[rank]):
        if action.kind is Kind.RECV_G:
            places[from_mirror(action)] = place
        elif action.kind in (Kind.B, Kind.W):  # the last one of a replica stays
            assert action.microbatch is not None
            places[from_own(order.placement.pipe_of[action.microbatch], action.stage)] = place
    readers: dict[Need, frozenset[str]] = {}
    for need in places:
        source, first, stage = need
        found = replicas[first, stage].parameters if source == "own" else exchange.names_from(stage, first)
        readers[need] = frozenset(found)
    needs = {name: frozenset(need for need in places if name in readers[need]) for name in names}

    def when(name: str) -> tuple[int, list[Need], str]:
        return max(places[need] for need in needs[name]), sorted(needs[name]), str(exchange.owned[name].dtype)

    waiting = sorted((name for name in needs if needs[name]), key=when)  # what nobody reads gets no gradient
    return tuple(
        Bucket(tuple(part), needs[part[0]])
        for _, together in groupby(waiting, key=when)
        for part in _parts(list(together), exchange.owned)
    )


def _parts(names: Sequence[str], owned: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Divide names so that a part has at most a bucket's bytes, or one name."""
    parts: list[list[str]] = []
    room = 0
    for name in names:
        if not parts or owned[name].nbytes > room:
            parts.append([])
            room = _BUCKET_BYTES
        parts[-1].append(name)
        room -= owned[name].nbytes
    return parts


class Buckets:
    """Makes and keeps the buckets of one rank, by order and by which parameters are trained."""

    def __init__(self, rank: int, exchange: Exchange, replicas: Mapping[tuple[int, int], Replica], width: Width) -> None:
        self._rank, self._exchange, self._replicas, self._width = rank, exchange, replicas, width
        self._kept: dict[tuple[int, tuple[str, ...]], tuple[Order, tuple[Bucket, ...]]] = {}

    def begin(self, order: Order) -> Reduction:
        """Begin the sums of one step."""
        names = tuple(name for name, parameter in self._exchange.owned.items() if parameter.requires_grad)
        kept = self._kept.get((id(order), names))
        if kept is None or kept[0] is not order:
            self._kept = {}  # orders and frozen parameters change rarely
            kept = order, buckets_of(self._rank, order, self._exchange, self._replicas, names)
            self._kept[id(order), names] = kept
        return Reduction(self._width, self._exchange, kept[1])


class Reduction:
    """The sums of one step: buckets that wait, and buckets on the way."""

    def __init__(self, width: Width, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        self._width, self._exchange = width, exchange
        self._waiting = deque((bucket, set(bucket.needs)) for bucket in buckets)
        self._going: list[tuple[_Flat, Answer, torch.Event | None]] = []

    def note(self, need: Need) -> None:
        """Something that gradients wait for is there; send off what is complete now."""
        for _, missing in self._waiting:
            missing.discard(need)
        while self._waiting and not self._waiting[0][1]:
            bucket, _ = self._waiting.popleft()
            totals = {name: self._exchange.total(name) for name in bucket.names}
            through = self._width.through
            lane = None if through is None else through.lane
            parameters = {name: self._exchange.owned[name] for name in bucket.names}
            flat = _Flat(totals, parameters, self._width.size, None if lane is None else lane.device)
            if through is None or lane is None:
                self._going.append((flat, self._width.begin_sum(flat.buffer), None))
            else:
                self._going.append((flat, self._width.begin_sum(flat.counts), through.begin_sum(flat.buffer)))

    def finish(self) -> None:
        """Wait for all sums, and give them to the exchange.

        Raises:
            PipelineError: Another rank failed, or a connection broke.
        """
        assert not self._waiting, "the order has all that its buckets wait for"
        for flat, answer, done in self._going:
            self._width.wait(answer, "the sum of the gradients")
            if done is not None and self._width.through is not None:
                self._width.through.end_sum(done)
            self._exchange.settle(flat.sums())
        self._going = []


class _Flat:
    """The gradients of a bucket one after the other in one buffer, and for each, how many pipelines have it: its ``counts``.

    They lie behind the gradients, so that one sum makes both, or, for a buffer on a ``device``, on the host, which needs them.
    """

    def __init__(
        self,
        totals: Mapping[str, torch.Tensor | None],
        parameters: Mapping[str, nn.Parameter],
        size: int,
        device: torch.device | None = None,
    ) -> None:
        self._totals, self._parameters = totals, parameters
        dtype = next(iter(parameters.values())).dtype
        end = sum(parameter.numel() for parameter in parameters.values())
        self.buffer = torch.empty(_multiple(end + (0 if device else len(parameters)), size), dtype=dtype, device=device or "cpu")
        self.buffer[end:] = 0
        self.counts = torch.zeros(_multiple(len(parameters), size), device="cpu") if device else self.buffer[end:]
        for (name, part), place in zip(self._parts(), range(len(parameters)), strict=True):
            total = totals[name]
            if total is None:
                part.zero_()
            else:
                if total.layout != torch.strided:
                    raise PipelineError(
                        f"the gradient of {name!r} has layout {total.layout}, which cannot be summed over pipelines; make it dense"
                    )
                part.copy_(total)
                self.counts[place] = 1

    def sums(self) -> dict[str, torch.Tensor | None]:
        """Return the sums in the buffer, each in memory of its own; None where no pipeline has a gradient."""
        found: dict[str, torch.Tensor | None] = {}
        counts = self.counts.real.tolist()
        for (name, part), count in zip(self._parts(), counts, strict=False):
            total = self._totals[name]
            if count and total is None:
                total = torch.empty_like(self._parameters[name], requires_grad=False)
            found[name] = total.copy_(part) if count and total is not None else None
        return found

    def _parts(self) -> Iterable[tuple[str, torch.Tensor]]:
        start = 0
        for name, parameter in self._parameters.items():
            yield name, self.buffer[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


def _multiple(count: int, size: int) -> int:
    return -(-count // size) * size
