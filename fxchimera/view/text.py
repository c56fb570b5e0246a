"""A timeline as text, one row a rank.

    chimera: makespan 16 s, bubble 25.0% (with a barrier)
    rank 0  F0-F1-...f2-b2====f3-b3====...B0====......B1====

A cell shows kind and micro-batch and is filled with ``-`` (forward) or ``=`` (backward); capitals go down, small letters up.
When there is no room for that, a cell is one letter for its micro-batch, small in the forward and capital in the backward: a, b,
c, ... count the micro-batches that go down, n, o, p, ... those that go up.  Durations that are multiples of one unit get exact
cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxchimera.schedule.action import Kind
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.timeline import Event, Timeline
from fxchimera.view.labels import label, summary

__all__ = ["gantt"]


def gantt(timeline: Timeline, *, width: int = 100) -> str:
    """Draws the computations of a timeline.

    Args:
        timeline: What to draw.
        width: Characters of a row at most; a timeline that needs more is drawn to scale.
    """
    place = timeline.placement
    heads = [f"rank {rank}" for rank in range(place.num_ranks)]
    margin = max(map(len, heads)) + 2
    scale, cells = _scale(timeline, max(width - margin, 1))
    # Rounding may take a part of a character from a cell: count whole ones, so that no label is ever cut.
    shortest = min((math.floor((event.end - event.start) * scale + 1e-6) for event in timeline.compute), default=0)
    wide = shortest >= _longest_label(timeline)
    letters = _letters(place)
    rows = [["."] * cells for _ in heads]
    for event in timeline.compute:
        begin, end = (_edge(time - timeline.start, scale) for time in (event.start, event.end))
        for column, character in zip(range(begin, min(end, cells)), _cell(event, place, letters, wide), strict=False):
            rows[event.rank][column] = character
    lines = [summary(timeline), *(f"{head:<{margin}}{''.join(row)}" for head, row in zip(heads, rows, strict=True))]
    return "\n".join([*lines, _legend(place, wide)]) + "\n"


def _cell(event: Event, place: Placement, letters: str, wide: bool) -> Iterator[str]:
    """The characters of a computation's cell, without end."""
    action = event.action
    assert action.microbatch is not None
    if wide:
        yield from label(action, place)
        while True:
            yield "-" if action.kind is Kind.F else "="
    letter = letters[action.microbatch]
    while True:
        yield letter if action.kind is Kind.F else letter.upper()


def _letters(place: Placement) -> str:
    """One letter a micro-batch; of two pipes, the first has a-m and the second n-z, of one pipe it has all; then they repeat."""
    pipes = min(len(place.pipes), 2)
    size = 26 // pipes
    count = [0] * len(place.pipes)
    letters = []
    for pipe in place.pipe_of:
        letters.append(chr(ord("a") + pipe % 2 * size + count[pipe] % size))
        count[pipe] += 1
    return "".join(letters)


def _scale(timeline: Timeline, room: int) -> tuple[float, int]:
    """Characters a second, and the characters of the whole timeline: exact cells of one unit where that fits, else all the room."""
    if not timeline.makespan:
        return 0.0, 0
    unit = _unit(timeline)
    if unit is not None and (slots := round(timeline.makespan / unit)) <= room:
        characters = min(room // slots, _longest_label(timeline) + 1)
        return characters / unit, characters * slots
    return room / timeline.makespan, room


def _unit(timeline: Timeline) -> float | None:
    """The longest time of which every start and end is a multiple, or None when there is none to speak of."""
    times = sorted({time - timeline.start for event in timeline.compute for time in (event.start, event.end)} | {timeline.makespan})
    tolerance = timeline.makespan * 1e-6
    unit = 0.0
    for time in times:
        rest = time
        while rest > tolerance:
            unit, rest = rest, math.fmod(unit, rest)
            if unit - rest < tolerance:  # fmod of nearly equal numbers
                rest = 0.0
    exact = unit > tolerance * 100 and all(abs(time / unit - round(time / unit)) * unit < tolerance for time in times)
    return unit if exact else None


def _longest_label(timeline: Timeline) -> int:
    return max((len(label(event.action, timeline.placement)) for event in timeline.compute), default=0)


def _edge(time: float, scale: float) -> int:
    return math.floor(time * scale + 0.5)


def _legend(place: Placement, wide: bool) -> str:
    two_way = len(place.pipes) > 1
    if wide:
        return "F- forward, B= backward, . idle" + ("; capitals: down pipe, small: up pipe" if two_way else "")
    which = "; a-m: down pipe, n-z: up pipe" if two_way else ""
    return f"one letter a micro-batch, small: forward, capital: backward, . idle{which}"
