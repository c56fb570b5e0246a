"""A timeline as text, one row a rank.

    chimera: makespan 16 s, bubble 25.0% (with a barrier)
    rank 0  F0-F1-...f2-b2====f3-b3====...B0====......B1====

A cell shows kind and micro-batch and is filled with ``-`` (forward) or ``=`` (backward); capitals go down, small letters up.
When there is no room for that, a cell is one letter for its micro-batch, small in the forward and capital in the backward: a, b,
c, ... count the micro-batches that go down, n, o, p, ... those that go up.  Durations that are multiples of one unit get exact
cells.

Two runs of one order, predicted and measured, have two rows a rank on one scale (or two, if one would hardly be seen):

    rank 0  predicted  F0-F1-...B0====B1====......
            measured   F0--F1--....B0====B1======.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxchimera.schedule.action import Kind
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.timeline import Event, Timeline
from fxchimera.view.labels import comparable, label, ratio_text, summary

__all__ = ["gantt", "pair"]


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
    wide = _has_room(timeline, scale)
    lines = [f"{head:<{margin}}{_row(timeline, rank, scale, cells, wide)}" for rank, head in enumerate(heads)]
    return "\n".join([summary(timeline), *lines, _legend(place, wide)]) + "\n"


def pair(predicted: Timeline, measured: Timeline, *, width: int = 100) -> str:
    """Draws two runs of one order over each other, two rows a rank, on one time scale if they are comparable.

    Raises:
        ScheduleError: They have another number of ranks.
    """
    both = {"predicted": predicted, "measured": measured}
    ratio = ratio_text(predicted, measured)
    place = predicted.placement
    label_width = max(map(len, both)) + 2
    margin = len(f"rank {place.num_ranks - 1}") + 2
    cells = max(width - margin - label_width, 1)
    longest = max(timeline.makespan for timeline in both.values())
    cells = cells if longest else 0
    lengths = {name: longest if comparable(predicted, measured) else timeline.makespan for name, timeline in both.items()}
    scales = {name: cells / length if length else 0.0 for name, length in lengths.items()}
    wide = all(_has_room(timeline, scales[name]) for name, timeline in both.items())
    lines = [f"{name:<{label_width}}{summary(timeline)}" for name, timeline in both.items()]
    for rank in range(place.num_ranks):
        for head, (name, timeline) in zip((f"rank {rank}", ""), both.items(), strict=True):
            lines.append(f"{head:<{margin}}{name:<{label_width}}{_row(timeline, rank, scales[name], cells, wide)}")
    return "\n".join([*lines, ratio, _legend(place, wide)]) + "\n"


def _has_room(timeline: Timeline, scale: float) -> bool:
    """Whether every cell can carry its label; rounding may take a part of a character, so whole ones are counted."""
    shortest = min((math.floor((event.end - event.start) * scale + 1e-6) for event in timeline.compute), default=0)
    return shortest >= _longest_label(timeline)


def _row(timeline: Timeline, rank: int, scale: float, cells: int, wide: bool) -> str:
    row, letters = ["."] * cells, _letters(timeline.placement)
    for event in timeline.compute:
        if event.rank == rank:
            begin, end = (_edge(time - timeline.start, scale) for time in (event.start, event.end))
            for column, character in zip(
                range(begin, min(end, cells)), _cell(event, timeline.placement, letters, wide), strict=False
            ):
                row[column] = character
    return "".join(row)


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
