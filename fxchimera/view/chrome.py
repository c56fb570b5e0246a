"""Timelines as Chrome's trace JSON, for https://ui.perfetto.dev and chrome://tracing.

One process a timeline, one thread a rank; messages lie on threads of their own below their rank, as many as overlap, because
events of one thread must nest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fxchimera.schedule.timeline import Event, Timeline

__all__ = ["trace"]


def trace(timelines: Mapping[str, Timeline]) -> str:
    """Writes timelines side by side; times in microseconds from each timeline's start, names in torch's text.

    Args:
        timelines: Timeline by the name that its process gets.
    """
    events = [entry for pid, (name, timeline) in enumerate(timelines.items()) for entry in _process(pid, name, timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _process(pid: int, name: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    tid = 0
    for rank in range(timeline.placement.num_ranks):
        mine = sorted((event for event in timeline.events if event.rank == rank), key=lambda event: (event.start, event.end))
        rows = [[event for event in mine if event.action.kind.is_compute]]
        rows += _rows([event for event in mine if not event.action.kind.is_compute])
        for number, row in enumerate(rows):
            title = f"rank {rank}" if number == 0 else f"rank {rank} messages {number}"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for event in row:
                yield _complete(pid, tid, event, timeline)
            tid += 1


def _rows(events: list[Event]) -> list[list[Event]]:
    """Deals events, sorted by start, onto rows in which none overlap."""
    rows: list[list[Event]] = []
    for event in events:
        row = next((row for row in rows if row[-1].end <= event.start), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def _complete(pid: int, tid: int, event: Event, timeline: Timeline) -> dict[str, Any]:
    action = event.action
    args: dict[str, Any] = {"rank": event.rank, "stage": action.stage}
    if action.microbatch is not None:
        pipe = timeline.placement.pipe_of[action.microbatch]
        args |= {"microbatch": action.microbatch, "pipe": timeline.placement.pipe_name(pipe)}
    if action.peer is not None:
        args["peer"] = action.peer
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.value,
        "pid": pid,
        "tid": tid,
        "ts": (event.start - timeline.start) * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": args,
    }
