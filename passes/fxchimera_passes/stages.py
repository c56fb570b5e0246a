"""Choose the cut: candidates from the exact balancer, judged by a score, improved a little by hand.

The balancer minimises the heaviest stage.  What the user waits for is the makespan of a schedule, which also feels what crosses
the cuts and, with two directions, the sum of the stages s and D-1-s that share a rank.  So several good cuts are made, the caller's
``score`` (a simulation) picks one, and single cuts are moved while that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.assemble import assemble, owners
from fxchimera_passes.atoms import Atoms, contract
from fxchimera_passes.balance import Cut, cut, most_parts
from fxchimera_passes.captured import Captured
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.liveness import Liveness, sweep
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.points import positions_of
from fxchimera_passes.transfer import transfer

__all__ = ["Score", "make_plan", "transfer"]

Score = Callable[[Sequence[Stage]], float]

# Relative loss of balance worth trying for fewer bytes; the first alone is used without a score.
_SLACKS = (0.05, 0.0, 0.02, 0.1, 0.2)
# A climb stops after so many nodes assembled over all tries: about a second of Python.
_CLIMB_NODES = 400_000
_CLIMB_TRIES = 200


@dataclass(frozen=True, slots=True)
class _Search:
    """One planning problem: how to turn positions in atoms into stages."""

    captured: Captured
    live: Liveness
    costs: NodeCosts
    atoms: Atoms

    def stages(self, cuts: Sequence[int]) -> tuple[Stage, ...]:
        """The stages of a cut before each atom of ``cuts``."""
        positions = [self.atoms.starts[a] for a in cuts]
        return assemble(self.captured, self.live, self.costs, positions, owners(self.captured, self.live, positions))


def make_plan(
    captured: Captured,
    costs: NodeCosts,
    num_stages: int,
    *,
    split_points: Sequence[str] = (),
    score: Score | None = None,
) -> StagePlan:
    """Assign every node to one of ``num_stages`` stages, each of which owns at least one parameter.

    Args:
        captured: the recording to cut.
        costs: seconds per node.
        num_stages: how many stages, at least 1.
        split_points: qualified names of the modules that begin stages 1, 2, ... instead of a balanced cut.
        score: predicted seconds of one step with these stages; the smallest wins.  Called some hundred times.

    Raises:
        PartitionError: too few places to cut, a stage without a parameter, or split points that cannot be used.
    """
    if num_stages < 1:
        raise PartitionError(f"num_stages must be at least 1, got {num_stages}")
    live = sweep(captured)
    if not live.carried:
        raise PartitionError(f"nothing to cut into {num_stages} stages: the recorded forward runs no operation on a parameter")
    search = _Search(captured, live, costs, contract(captured, live, costs))
    if split_points:
        cuts: tuple[int, ...] = positions_of(captured, live, search.atoms, num_stages, split_points)
        bound = _bound(search.atoms, num_stages)
    else:
        best = _balanced(captured, search.atoms, num_stages, 0.0)
        cuts, bound = _choose(search, num_stages, score), best.bound
    positions = [search.atoms.starts[a] for a in cuts]
    owner = owners(captured, live, positions)
    stages = assemble(captured, live, costs, positions, owner)
    _require_parameters(stages)
    bottleneck = max(stage.cost_seconds for stage in stages)
    # the same sums in another order may differ in the last bit
    return StagePlan(stages=stages, owner=owner, bottleneck_seconds=bottleneck, bound_seconds=min(bound, bottleneck))


def _bound(atoms: Atoms, num_stages: int) -> float:
    """A lower bound of the heaviest stage that holds for any legal cut."""
    return max(sum(atoms.seconds) / num_stages, max(atoms.seconds))


def _balanced(captured: Captured, atoms: Atoms, num_stages: int, slack: float) -> Cut:
    most = most_parts(len(atoms.seconds), counts=atoms.parameters)
    if num_stages == 1:
        return Cut((), sum(atoms.seconds), sum(atoms.seconds))
    if most < num_stages:
        closed = sorted(name for name in captured.report.closed if name)[:5]
        hint = f"; recorded as one piece: {', '.join(closed)}" if closed else ""
        owning = sum(count > 0 for count in atoms.parameters)
        raise PartitionError(
            f"{num_stages} stages were asked for, but the recorded forward can be cut into at most {most} that own a parameter "
            f"each ({len(atoms.seconds)} cuttable pieces, {owning} of them with parameters of their own){hint}. "
            f"Use num_stages={max(most, 1)} or fewer, or a model with more layers"
        )
    return cut(atoms.seconds, num_stages, crossing=atoms.crossing, counts=atoms.parameters, slack=slack)


def _choose(search: _Search, num_stages: int, score: Score | None) -> tuple[int, ...]:
    """The candidate with the best score, climbed."""
    if score is None or num_stages == 1:
        return _balanced(search.captured, search.atoms, num_stages, _SLACKS[0]).positions
    starts = dict.fromkeys(_balanced(search.captured, search.atoms, num_stages, slack).positions for slack in _SLACKS)
    even = next(iter(starts))
    starts[_climb(search.atoms, even, lambda cuts: _pair_cost(search.atoms, cuts), _CLIMB_TRIES)] = None

    def judge(cuts: tuple[int, ...]) -> float:
        return score(search.stages(cuts))

    best = min(starts, key=judge)
    tries = max(8, min(_CLIMB_TRIES, _CLIMB_NODES // len(search.live.nodes)))
    return _climb(search.atoms, best, judge, tries)


def _pair_cost(atoms: Atoms, cuts: tuple[int, ...]) -> float:
    """Heaviest sum of the stages s and D-1-s, which share a rank when there are two directions; the heaviest stage breaks ties."""
    edges = (0, *cuts, len(atoms.seconds))
    seconds = [sum(atoms.seconds[a:b]) for a, b in pairwise(edges)]
    return max(map(sum, zip(seconds, reversed(seconds), strict=True))) + 1e-3 * max(seconds)


def _climb(atoms: Atoms, start: tuple[int, ...], judge: Callable[[tuple[int, ...]], float], tries: int) -> tuple[int, ...]:
    """Take the first move that the judge likes better, until there is none or ``judge`` was called ``tries`` times."""
    best, least, seen = start, judge(start), {start}
    improved = True
    while improved:
        improved = False
        for shift in _moves(len(start)):
            moved = tuple(cut + by for cut, by in zip(best, shift, strict=True))
            if moved in seen or not _legal(atoms, moved):
                continue
            if len(seen) >= tries:
                return best
            seen.add(moved)
            value = judge(moved)
            if value < least:
                best, least, improved = moved, value, True
                break
    return best


def _moves(cuts: int) -> Iterator[tuple[int, ...]]:
    """Shifts of the cuts, small changes first: one cut, all cuts from one on, any two cuts."""
    for step in (-1, 1, -3, 3):
        for at in range(cuts):
            yield tuple(step if i == at else 0 for i in range(cuts))
    for step in (-1, 1):
        for at in range(cuts):
            yield tuple(step if i >= at else 0 for i in range(cuts))
    for first, second in product((-1, 1), repeat=2):
        for a, b in combinations(range(cuts), 2):
            yield tuple(first if i == a else second if i == b else 0 for i in range(cuts))


def _legal(atoms: Atoms, cuts: tuple[int, ...]) -> bool:
    edges = (0, *cuts, len(atoms.seconds))
    return all(a < b and any(atoms.parameters[a:b]) for a, b in pairwise(edges))


def _require_parameters(stages: Sequence[Stage]) -> None:
    for stage in stages if len(stages) > 1 else ():
        if not stage.owned:
            raise PartitionError(
                f"stage {stage.index} ({stage.nodes[0]!r} to {stage.nodes[-1]!r}) would own no parameter: every one that it reads "
                "belongs to an earlier stage. Move its split point to a module with parameters of its own"
            )
