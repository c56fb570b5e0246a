"""A loop whose length hangs on parameters may run longer than it was recorded: every stage near it reads what it reads.

    recorded    first | cell halt | cell halt | last            while (acc < 1).any():
    longer      first | cell halt | cell halt cell halt | last

The cut stays, so the further rounds fall to the last stage of the loop or to the next one with parameters; these must then have
the parameters of a whole round, as mirrors, from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxchimera_passes.atoms import parameter_bytes, parameter_reads
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.liveness import Liveness
from fxchimera_passes.plan import Stage

__all__ = ["with_loops"]


@dataclass(frozen=True, slots=True)
class _Loop:
    """Positions of the first and last node that reads one of ``names``."""

    first: int
    last: int
    names: tuple[str, ...]


def with_loops(captured: Captured, live: Liveness, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Add to each stage the parameters of loops that may reach into it; nothing where no answer is assumed twice at a line."""
    lines = Counter(assumption.line for assumption in captured.assumed)
    if not lines or max(lines.values()) < 2:
        return tuple(stages)
    reads = parameter_reads(captured, live)
    stage_of = {name: stage.index for stage in stages for name in stage.nodes}
    extended = list(stages)
    for loop in _loops(live, reads):
        begin = stage_of[live.nodes[loop.first].name]
        for number in range(begin, _end(live, loop, reads, stage_of, len(stages) - 1) + 1):
            stage = extended[number]
            new = [name for name in loop.names if name not in stage.parameters]
            more = sum(parameter_bytes(captured, name) for name in new if name not in stage.owned)
            extended[number] = replace(stage, parameters=(*stage.parameters, *new), parameter_bytes=stage.parameter_bytes + more)
    return tuple(extended)


def _loops(live: Liveness, reads: Mapping[int, tuple[str, ...]]) -> list[_Loop]:
    """The parameters that one line reads again and again, those whose rounds overlap together."""
    calls: dict[tuple[str, str], list[int]] = {}
    carried = set(live.carried)
    for place, names in reads.items():
        for name in names if place in carried else ():
            calls.setdefault((name, info(live.nodes[place]).line), []).append(place)
    spans = sorted((min(places), max(places), name) for (name, _), places in calls.items() if len(places) > 1)
    loops: list[_Loop] = []
    for first, last, name in spans:
        if loops and first <= loops[-1].last:
            before = loops[-1]
            loops[-1] = _Loop(before.first, max(before.last, last), tuple(dict.fromkeys((*before.names, name))))
        else:
            loops.append(_Loop(first, last, (name,)))
    return loops


def _end(live: Liveness, loop: _Loop, reads: Mapping[int, tuple[str, ...]], stage_of: Mapping[str, int], last: int) -> int:
    """The stage of the first node after the loop that reads another parameter: further rounds end before it."""
    after = (place for place in live.carried if place > loop.last and set(reads.get(place, ())) - set(loop.names))
    place = next(after, None)
    return last if place is None else stage_of[live.nodes[place].name]
