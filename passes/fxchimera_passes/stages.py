"""Choose the cut: candidates from the exact balancer, judged by a score, improved a little by hand.

The balancer minimises the heaviest stage.  What the user waits for is the makespan of a schedule, which also feels what crosses
the cuts and, with two directions, the sum of the stages s and D-1-s that share a rank.  So several good cuts are made, the caller's
``score`` (a simulation) picks one, and single cuts are moved while that helps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.assemble import assemble, owners
from fxchimera_passes.atoms import Atoms, contract
from fxchimera_passes.balance import Cut, cuts
from fxchimera_passes.captured import Captured
from fxchimera_passes.coarse import Division, divide, lend, shortage
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.fitting import Room, candidates
from fxchimera_passes.liveness import Liveness, sweep
from fxchimera_passes.loops import with_loops
from fxchimera_passes.plan import Load, Stage, StagePlan
from fxchimera_passes.points import Place, positions_of
from fxchimera_passes.transfer import transfer
from fxchimera_passes.trial import Trial

__all__ = ["Ground", "Score", "make_plan", "transfer"]

Score = Callable[[Sequence[Load]], float]
_Judge = Callable[[tuple[int, ...]], tuple[float, float]]  # what is too much, then seconds: the smallest pair wins

# Relative loss of balance worth trying for fewer bytes; the first alone is used without a score.
_SLACKS = (0.05, 0.0, 0.02, 0.1, 0.2)
_CLIMB_TRIES = 200
# With a limit on memory each try is assembled, so a climb stops after so many nodes over all tries: about a second of Python.
_CLIMB_NODES = 400_000
_CLIMBS_WITHIN_ROOM = 3  # the limit leaves islands of cuts that fit
# A graph of so many pieces is balanced to a thousandth anyway; a search as long as that of a small one would take a second.
_MANY_ATOMS = 20_000
_FEW_TRIES = 40


@dataclass(frozen=True, slots=True)
class _Search:
    """One planning problem: how to turn positions in atoms into stages."""

    captured: Captured
    live: Liveness
    costs: NodeCosts
    atoms: Atoms
    division: Division

    def stages(self, cuts: Sequence[int]) -> tuple[tuple[Stage, ...], dict[str, int]]:
        """The stages of a cut before each atom of ``cuts``, after those that compute nothing, and every parameter's owner."""
        positions = [0] * self.division.empty + [self.atoms.starts[a] for a in cuts]
        reads = self.atoms.reads
        owner = lend(self.captured, self.live, positions, owners(self.captured, self.live, positions, reads))
        stages = assemble(self.captured, self.live, self.costs, positions, owner, reads)
        return with_loops(self.captured, self.live, stages), owner

    def balanced(self, slacks: Sequence[float]) -> tuple[Cut, ...]:
        """The most even cuts but for each of ``slacks``."""
        division, atoms = self.division, self.atoms
        return cuts(atoms.seconds, division.parts, slacks, crossing=atoms.crossing, counts=division.counts)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Do without Python's cycle collector: it would walk the graph again and again while a plan is made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Ground:
    """What all cuts of one recording have in common: made once where several are planned."""

    live: Liveness
    atoms: Atoms

    @classmethod
    @_uncollected()
    def of(cls, captured: Captured, costs: NodeCosts) -> Ground:
        """Find out what is alive at each place, and what must stay together.

        Raises:
            PartitionError: the recording runs no operation on a parameter.
        """
        live = sweep(captured)
        if not live.carried:
            raise PartitionError(
                f"nothing to cut into stages: {type(captured.model).__name__}.forward runs no operation on one of the model's "
                f"{len(captured.parameters)} parameters, only {len(live.nodes)} that any stage can repeat"
            )
        return cls(live, contract(captured, live, costs))


@_uncollected()
def make_plan(
    captured: Captured,
    costs: NodeCosts,
    num_stages: int,
    *,
    split_points: Sequence[Place] = (),
    score: Score | None = None,
    room: Room | None = None,
    ground: Ground | None = None,
) -> StagePlan:
    """Assign every node to one of ``num_stages`` stages, each of which owns at least one parameter.

    A model that has too few pieces gets stages that compute nothing; the plan's ``notes`` say so.

    Args:
        captured: the recording to cut.
        costs: seconds per node.
        num_stages: how many stages, at least 1.
        split_points: where stages 1, 2, ... begin (qualified names of modules), instead of a balanced cut.
        score: predicted seconds of one step with these stages; the smallest wins.  Called some hundred times.
        room: the memory of the ranks; a cut that does not fit is not made.
        ground: that of the recording and the costs, if it is known.

    Raises:
        PartitionError: fewer parameters than stages, split points that cannot be used, or no cut fits into ``room``.
    """
    if num_stages < 1:
        raise PartitionError(f"num_stages must be at least 1, got {num_stages}")
    known = ground or Ground.of(captured, costs)
    live, atoms = known.live, known.atoms
    division = Division(num_stages, 0, ()) if split_points else divide(captured, atoms, num_stages)
    search = _Search(captured, live, costs, atoms, division)
    if split_points:
        chosen, bound = positions_of(captured, live, atoms, num_stages, split_points), _bound(atoms, num_stages)
    else:
        chosen, bound = _choose(search, score, room)
    stages, owner = search.stages(chosen)
    if room is not None and room.overrun(stages):
        raise PartitionError(room.refusal(stages))
    bottleneck = max(stage.cost_seconds for stage in stages)
    return StagePlan(
        stages=stages,
        owner=owner,
        bottleneck_seconds=bottleneck,
        bound_seconds=min(bound, bottleneck),  # the same sums in another order may differ in the last bit
        notes=(shortage(captured, live, atoms, division),) if division.empty else (),
    )


def _bound(atoms: Atoms, num_stages: int) -> float:
    """A lower bound of the heaviest stage that holds for any legal cut."""
    return max(sum(atoms.seconds) / num_stages, max(atoms.seconds))


def _choose(search: _Search, score: Score | None, room: Room | None) -> tuple[tuple[int, ...], float]:
    """The candidate with the best score among those that fit, climbed, and the balancer's bound.

    One that does not fit is worse than any that does.
    """
    if (score is None and room is None) or search.division.parts == 1:
        (found,) = search.balanced(_SLACKS[:1])
        return found.positions, found.bound
    many = len(search.atoms.starts) > _MANY_ATOMS
    most = _FEW_TRIES if many else _CLIMB_TRIES
    balanced = search.balanced(_SLACKS[:2] if many else _SLACKS)
    trial = Trial.of(search.live, search.costs, search.atoms.starts, search.division)
    starts = dict.fromkeys(cut.positions for cut in balanced)
    starts[_climb(trial, balanced[0].positions, lambda cuts: (0.0, trial.pair_seconds(cuts)), most)] = None
    if room is not None:
        starts.update(dict.fromkeys(candidates(search.atoms, search.division.counts, search.division.empty, room)))

    def judge(cuts: tuple[int, ...]) -> tuple[float, float]:
        loads = trial.loads(cuts)
        seconds = score(loads) if score is not None else max(load.cost_seconds for load in loads)
        return room.overrun(search.stages(cuts)[0]) if room is not None else 0.0, seconds

    tries = most if room is None else max(8, min(most, _CLIMB_NODES // len(search.live.nodes)))
    tops = sorted(starts, key=judge)[: 1 if room is None else _CLIMBS_WITHIN_ROOM]
    return min((_climb(trial, start, judge, tries) for start in tops), key=judge), balanced[0].bound


def _climb(trial: Trial, start: tuple[int, ...], judge: _Judge, tries: int) -> tuple[int, ...]:
    """Take the first move that the judge likes better, until there is none or ``judge`` was called ``tries`` times."""
    best, least, seen = start, judge(start), {start}
    improved = True
    while improved:
        improved = False
        for shift in _moves(len(start), max(1, (len(trial.held) - 1) // _MANY_ATOMS * 10)):
            moved = tuple(cut + by for cut, by in zip(best, shift, strict=True))
            if moved in seen or not trial.legal(moved):
                continue
            if len(seen) >= tries:
                return best
            seen.add(moved)
            value = judge(moved)
            if value < least:
                best, least, improved = moved, value, True
                break
    return best


def _moves(cuts: int, unit: int) -> Iterator[tuple[int, ...]]:
    """Shifts of the cuts, in atoms, small changes first: one cut, all cuts from one on, any two cuts."""
    for step in (-unit, unit, -3 * unit, 3 * unit):
        for at in range(cuts):
            yield tuple(step if i == at else 0 for i in range(cuts))
    for step in (-unit, unit):
        for at in range(cuts):
            yield tuple(step if i >= at else 0 for i in range(cuts))
    for first, second in product((-unit, unit), repeat=2):
        for a, b in combinations(range(cuts), 2):
            yield tuple(first if i == a else second if i == b else 0 for i in range(cuts))
