"""How much each stage computes again in its backward instead of keeping it: as the user says, or as little as the memory asks for.

Memory is saved by fewer micro-batches in flight, too, so a plan is also made without; the one whose step ends sooner counts.

need of the tightest rank  > cap:  the stage and mode there that save most bytes per second of recomputation, and again
                          <= cap:  take back what turned out not to be needed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxchimera.errors import FxChimeraError, PartitionError
from fxchimera.planner.caps import readable_bytes
from fxchimera.planner.memory import RankMemory
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import MODES, NONE, Load, Stage, StagePlan
from fxchimera_passes.recomputation import Recomputation

__all__ = ["AUTO", "Needs", "Recompute", "Relief", "reliefs", "understood", "what_was_tried"]

AUTO = "auto"

Recompute = str | Sequence[str]
"""One of "none", "selective", "full", "auto", or one of the first three for each stage."""

Needs = Callable[[Sequence[Stage]], Sequence[RankMemory]]


def understood(recompute: Recompute) -> tuple[str, ...]:
    """Return the modes that are named.

    Raises:
        FxChimeraError: ``recompute`` is not understood.
    """
    modes = (recompute,) if isinstance(recompute, str) else tuple(recompute)
    known = (*MODES, AUTO) if isinstance(recompute, str) else MODES
    if not modes or any(mode not in known for mode in modes):
        raise FxChimeraError(
            f'recompute must be "none", "selective", "full" or "auto", or one of the first three for each stage, got {recompute!r}'
        )
    return modes


def reliefs(recompute: Recompute, captured: Captured, costs: NodeCosts, *, capped: bool) -> tuple[Relief | None, ...]:
    """Return what to plan with, that with the most room last: the plan that ends soonest counts.  None is without recomputation.

    Raises:
        FxChimeraError: ``recompute`` is not understood.
    """
    modes = understood(recompute)
    if recompute == AUTO:
        return (None, Relief(Recomputation.of(captured, costs), None)) if capped else (None,)
    if recompute == NONE:
        return (None,)
    return (Relief(Recomputation.of(captured, costs), recompute if isinstance(recompute, str) else modes),)


@dataclass(frozen=True, slots=True)
class Relief:
    """What stages compute again; ``modes`` are one for all, one for each, or None: what the memory asks for."""

    again: Recomputation
    modes: str | tuple[str, ...] | None

    @property
    def saved(self) -> float:
        """About what part of a stage's activations is still kept at the most recomputation, to propose cuts with."""
        modes = {self.modes} if isinstance(self.modes, str) else set(self.modes or MODES)
        return min(map(self.again.kept_share, modes))

    def loads(self, loads: Sequence[Load]) -> Sequence[Load]:
        """What the stages of a trial cut cost with the modes that are set by hand, about."""
        if self.modes is None:
            return loads
        share = {mode: self.again.share(mode) for mode in MODES}
        pairs = zip(loads, self._each(len(loads)), strict=True)
        extra = [share[mode] * load.forward_seconds for load, mode in pairs]
        return [
            replace(load, backward_seconds=load.backward_seconds + seconds, recompute_seconds=seconds)
            for load, seconds in zip(loads, extra, strict=True)
        ]

    def most(self, stages: Sequence[Stage], held: Sequence[int]) -> tuple[Stage, ...]:
        """The stages with as much recomputation as helps, when ``held[s]`` micro-batches of stage s are in flight at once."""
        if self.modes is not None:
            return self._by_hand(stages)
        return tuple(
            min(self._ways(stage), key=lambda way: count * way.activation_bytes + way.recompute_bytes)
            for stage, count in zip(stages, held, strict=True)
        )

    def applied(self, cut: StagePlan, needs: Needs, caps: Sequence[int], held: Sequence[int]) -> StagePlan:
        """The cut with the recomputation that was asked for, or with as much as ``caps`` need."""
        stages = self._by_hand(cut.stages) if self.modes is not None else self._least(cut.stages, needs, caps, held)
        return replace(cut, stages=stages)

    def _by_hand(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        return tuple(self.again.applied(stage, mode) for stage, mode in zip(stages, self._each(len(stages)), strict=True))

    def _each(self, count: int) -> tuple[str, ...]:
        if not isinstance(self.modes, tuple):
            return (self.modes or NONE,) * count
        if len(self.modes) != count:
            raise PartitionError(f"recompute has {len(self.modes)} modes for {count} stages; give one for all, or one for each")
        return self.modes

    def _ways(self, stage: Stage) -> list[Stage]:
        return [self.again.applied(stage, mode) for mode in MODES]

    def _least(self, stages: Sequence[Stage], needs: Needs, caps: Sequence[int], held: Sequence[int]) -> tuple[Stage, ...]:
        plain, most = tuple(stages), self.most(stages, held)

        def excess(tried: Sequence[Stage]) -> list[float]:
            return [need.total / cap for need, cap in zip(needs(tried), caps, strict=True)]

        now = plain
        while max(over := excess(now)) > 1.0:
            rank = over.index(max(over))
            here = {stage for _, stage, _ in needs(now)[rank].in_flight}
            tries = [_exchanged(now, way) for stage in here for way in self._ways(plain[stage]) if _more(way, now[stage])]
            tries = [tried for tried in tries if excess(tried)[rank] < over[rank]]
            if not tries:
                return most
            now = max(tries, key=lambda tried: (over[rank] - excess(tried)[rank]) / max(_seconds(tried) - _seconds(now), 1e-30))
        for stage in sorted(range(len(now)), key=lambda s: -now[s].recompute_seconds):
            ways = [_exchanged(now, way) for way in self._ways(plain[stage]) if _more(now[stage], way)]
            now = next((tried for tried in ways if max(excess(tried)) <= 1.0), now)
        return now


def what_was_tried(need: RankMemory, stages: Sequence[Stage]) -> str:
    """Say, for a rank that needs too much even so, what its stages compute again and what they cannot."""
    here = [stages[number] for number in dict.fromkeys(stage for _, stage, _ in need.in_flight)]
    modes = ", ".join(f'stage {stage.index} "{stage.recompute}"' for stage in here)
    whole = [reason for stage in here for reason in stage.kept_whole]
    cannot = f"; not run again: {whole[0]}" + (f", and {len(whole) - 1} more" if whole[1:] else "") if whole else ""
    moment = f", for a moment in a backward {readable_bytes(need.recomputation)}" if need.recomputation else ""
    return f"{moment} (with the recomputation that was tried: {modes}{cannot})"


def _exchanged(stages: tuple[Stage, ...], new: Stage) -> tuple[Stage, ...]:
    return (*stages[: new.index], new, *stages[new.index + 1 :])


def _more(one: Stage, other: Stage) -> bool:
    return MODES.index(one.recompute) > MODES.index(other.recompute)


def _seconds(stages: Sequence[Stage]) -> float:
    return sum(stage.recompute_seconds for stage in stages)
