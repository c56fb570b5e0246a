"""Activation recomputation: which parts of a stage are run again in the backward, and what that saves and costs.

    mode        kept of a region from its forward to its backward
    none        all that autograd saves
    selective   what enters it, and what its products, convolutions and attention made
    full        what enters it

A stage is divided into regions that are run again one after the other, the last first, so that the activations of one region at a
time are there in full.  More regions keep more inputs and need less at a time; the division is that with the least sum for a few
micro-batches in flight.  Selective recomputation is that of Korthikanti et al. 2022.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

from fxchimera_passes.analytic import NodeCosts, analytic, seconds_of
from fxchimera_passes.captured import Captured
from fxchimera_passes.liveness import Liveness, sweep
from fxchimera_passes.plan import FULL, NONE, SELECTIVE, Stage
from fxchimera_passes.repeatable import Repeatable

__all__ = ["Recomputation", "Region"]

_IN_FLIGHT = 4  # micro-batches that a division is made for; fixed, so that every recording of a model is divided alike
_MOST_REGIONS = 64

Region = tuple[int, ...]
_Memory = dict[int, int]  # bytes by number


@dataclass(frozen=True, slots=True)
class _Division:
    """Regions, what is kept for them, the most bytes that one of them needs beyond that while it runs again."""

    regions: tuple[Region, ...]
    kept: _Memory
    extra: int

    @property
    def weight(self) -> int:
        """What the division costs in bytes."""
        return _IN_FLIGHT * sum(self.kept.values()) + self.extra


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The recomputation of one recording; positions are those of ``live``."""

    live: Liveness
    costs: NodeCosts
    repeatable: Repeatable
    position: dict[str, int]
    sizes: _Memory
    cuttable: frozenset[int]
    _applied: dict[tuple[Stage, str], Stage] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, captured: Captured, costs: NodeCosts | None = None) -> Recomputation:
        """Look at a recording once; ``costs`` are the analytic ones when None."""
        live = sweep(captured)
        sizes: _Memory = {}
        for known in live.known:
            own = ((known.memory, known.value.bytes),) if known.value is not None and known.memory >= 0 else ()
            for number, size in (*own, *known.saved, *known.dear):
                sizes[number] = max(size, sizes.get(number, 0))
        position = {node.name: i for i, node in enumerate(live.nodes)}
        return cls(live, costs or analytic(captured), Repeatable.of(captured, live), position, sizes, frozenset(live.cuttable))

    def applied(self, stage: Stage, mode: str) -> Stage:
        """Return a stage without recomputation as it is with it: bytes, and the seconds of its backward."""
        if mode == NONE or stage.recompute != NONE:
            return stage
        if (stage, mode) not in self._applied:  # a search asks for the same stage again and again
            self._applied[stage, mode] = self._with(stage, mode)
        return self._applied[stage, mode]

    def _with(self, stage: Stage, mode: str) -> Stage:
        regions = self.regions(stage, mode)
        held = self._held(stage, regions, mode)
        seconds = sum(self._seconds(i, mode) for i in chain.from_iterable(regions))
        _, left = self.repeatable.runs(self._run(stage), whole=mode == FULL)
        return replace(
            stage,
            recompute=mode,
            recompute_seconds=seconds,
            recompute_bytes=max((self._extra(region, held) for region in regions), default=0),
            backward_seconds=stage.backward_seconds + seconds,
            activation_bytes=sum(held.values()),
            kept_whole=tuple(f"{self._name(i)} {why}" for i, why in sorted(left.items())),
        )

    def regions(self, stage: Stage, mode: str) -> tuple[Region, ...]:
        """What the stage runs again, as positions in order; nothing where that would keep no less."""
        if mode == NONE:
            return ()
        runs, _ = self.repeatable.runs(self._run(stage), whole=mode == FULL)
        return tuple(chain.from_iterable(self._divided(run, mode).regions for run in runs))

    def share(self, mode: str) -> float:
        """The part of the whole forward that is run again, were all of it in regions."""
        if mode in (NONE, FULL):
            return float(mode == FULL)
        calls = [i for i, node in enumerate(self.live.nodes) if node.op.startswith("call")]
        whole = sum(self.costs.forward.get(self.live.nodes[i].name, 0.0) for i in calls)
        return sum(self._seconds(i, mode) for i in calls) / whole if whole else 0.0

    def _name(self, i: int) -> str:
        node = self.live.nodes[i]
        return str(node.target) if node.op == "call_module" else node.name

    def kept_share(self, mode: str) -> float:
        """The part of all activations that is kept, were the whole recording one stage."""
        calls = [i for i, node in enumerate(self.live.nodes) if node.op.startswith("call")]
        whole = sum(self._saved(calls).values())
        if mode == NONE or not whole:
            return 1.0
        runs, left = self.repeatable.runs(calls, whole=mode == FULL)
        kept = self._saved(list(left))
        for run in runs:
            kept |= self._divided(run, mode).kept
        return sum(kept.values()) / whole

    def _run(self, stage: Stage) -> list[int]:
        return [self.position[name] for name in stage.nodes]

    def _divided(self, run: Region, mode: str) -> _Division:
        """The best of some divisions of a run into parts that save about as much each."""
        saved = list(accumulate(self.live.known[i].saved_bytes for i in run))
        places = [k for k, i in enumerate(run) if k and i in self.cuttable]
        best, pieces = self._division([run], mode), 2
        while pieces <= min(_MOST_REGIONS, len(places) + 1):
            ends = {self._narrowest(run, places, saved, (k - 0.5) / pieces, (k + 0.5) / pieces) for k in range(1, pieces)}
            parts = [run[a:b] for a, b in pairwise((0, *sorted(ends), len(run)))]
            best = min(best, self._division(parts, mode), key=lambda division: division.weight)
            pieces *= 2
        return best

    def _narrowest(self, run: Region, places: Sequence[int], saved: Sequence[int], low: float, high: float) -> int:
        """Where least crosses, of ``places`` between two parts of what a run saves; near the middle of these if all are alike."""
        first, last = (bisect_left(saved, part * saved[-1]) + 1 for part in (low, high))
        near = places[bisect_left(places, first) : bisect_right(places, last)] or places
        return min(near, key=lambda k: (self.live.sent_bytes[run[k]], abs(2 * k - first - last)))

    def _division(self, parts: Sequence[Region], mode: str) -> _Division:
        kept: _Memory = {}
        regions, inside = [], []
        for part in parts:
            saved, entering = self._saved(part), self._kept(part, mode)
            if sum(saved.values()) > sum(entering.values()):
                regions.append(part)
                inside.append(saved)
                kept |= entering
            else:
                kept |= saved
        extra = max((sum(size for number, size in saved.items() if number not in kept) for saved in inside), default=0)
        return _Division(tuple(regions), kept, extra)

    def _saved(self, nodes: Sequence[int]) -> _Memory:
        return dict(chain.from_iterable(self.live.known[i].saved for i in nodes))

    def _kept(self, region: Region, mode: str) -> _Memory:
        """What a region keeps: the memory of what enters it, and, selectively, of its dear results."""
        inside = set(region)
        numbers = {self.live.known[s].memory for i in region for s in self.live.inputs[i] if s not in inside}
        found = {number: self.sizes[number] for number in numbers if number >= 0}
        if mode == SELECTIVE:
            found |= dict(chain.from_iterable(self.live.known[i].dear for i in region))
        return found

    def _held(self, stage: Stage, regions: Sequence[Region], mode: str) -> _Memory:
        """What one micro-batch holds from its forward to its backward, as without recomputation but for the regions."""
        repeated = set(chain.from_iterable(regions))
        held = self._saved([i for i in self._run(stage) if i not in repeated])
        for region in regions:
            held |= self._kept(region, mode)
        there = {*self._run(stage), *(self.position[value.name] for value in stage.received)}
        sent = [self.position[value.name] for value in stage.sent]
        for i in sent or there.intersection(self.live.inputs[-1]):
            known = self.live.known[i]
            if known.value is not None and known.memory >= 0:
                held[known.memory] = max(held.get(known.memory, 0), known.value.bytes)
        for value in stage.received:  # received as a dense copy of its own
            held[self.live.known[self.position[value.name]].memory] = value.meta.bytes
        return held

    def _extra(self, region: Region, held: _Memory) -> int:
        return sum(size for number, size in self._saved(region).items() if number not in held)

    def _seconds(self, i: int, mode: str) -> float:
        """Forward seconds of a node that run again."""
        known = self.live.known[i]
        whole = seconds_of(known.forward_flops, known.moved_bytes)
        dear = seconds_of(known.dear_flops, known.dear_bytes) if mode == SELECTIVE and whole else 0.0
        share = max(0.0, 1.0 - dear / whole) if whole else 1.0
        return share * self.costs.forward.get(self.live.nodes[i].name, 0.0)
