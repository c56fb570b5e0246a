"""A prediction and a measurement drawn over each other: on one scale, each event where its time puts it."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import pytest

from fxchimera.schedule import Costs, Event, Timeline, lower, make_order, simulate
from fxchimera.view import Drawing, svg, text

SVG = "{http://www.w3.org/2000/svg}"


def run(seconds: float = 1.0, *, schedule: str = "1f1b", ranks: int = 2, count: int = 1, start: float = 0.0) -> Timeline:
    """Forward and backward of ``seconds`` each on every stage, the first at ``start``."""
    timeline = simulate(lower(make_order(schedule, ranks, count)), Costs.uniform(ranks, seconds, seconds))
    events = tuple(Event(e.rank, e.action, e.start + start, e.end + start) for e in timeline.events)
    return Timeline(timeline.name, timeline.placement, events)


def test_text_has_two_rows_a_rank_on_one_scale() -> None:
    """One micro-batch down and up through two stages, 4 s and 8 s: 24 characters for 8 s."""
    assert text.pair(run(), run(2.0, start=100.0), width=43) == (
        "predicted  1f1b: makespan 4 s, bubble 50.0% (with a barrier)\n"
        "measured   1f1b: makespan 8 s, bubble 50.0% (with a barrier)\n"
        "rank 0  predicted  F0-......B0=............\n"
        "        measured   F0----............B0====\n"
        "rank 1  predicted  ...F0-B0=...............\n"
        "        measured   ......F0----B0====......\n"
        "predicted / measured makespan: 0.500\n"
        "F- forward, B= backward, . idle\n"
    )


def test_text_without_room_for_labels() -> None:
    """Eight characters for 8 s; the prediction's cells are one wide, so all are letters."""
    rows = text.pair(run(), run(2.0), width=27).splitlines()[2:6]
    assert rows == [
        "rank 0  predicted  a..A....",
        "        measured   aa....AA",
        "rank 1  predicted  .aA.....",
        "        measured   ..aaAA..",
    ]


def test_what_one_scale_cannot_show_has_two() -> None:
    """Predicted by a model of another device: 4 ms where 8 s were measured; the prediction fills its row all the same."""
    rows = text.pair(run(1e-3), run(2.0), width=43).splitlines()
    assert rows[2:6] == [
        "rank 0  predicted  F0----............B0====",
        "        measured   F0----............B0====",
        "rank 1  predicted  ......F0----B0====......",
        "        measured   ......F0----B0====......",
    ]
    assert rows[6].startswith("predicted / measured makespan: 0.0005, so each is drawn to a scale of its own")
    root = ElementTree.fromstring(svg.pair(run(1e-3), run(2.0), width=960))
    ends = {"predicted": 0.0, "measured": 0.0}
    for bar in root.iter(f"{SVG}rect"):
        if (tip := bar.find(f"{SVG}title")) is not None:
            name = str(tip.text).split()[0]
            ends[name] = max(ends[name], float(bar.get("x")) + float(bar.get("width")))
    assert ends == {"predicted": pytest.approx(944, abs=0.1), "measured": pytest.approx(944, abs=0.1)}
    axis = [words.text for words in root.iter(f"{SVG}text") if words.get("text-anchor") == "end"]
    assert axis == ["8 s"]


def test_text_of_runs_that_take_no_time() -> None:
    nothing = Timeline("nothing", run().placement, ())
    assert text.pair(nothing, nothing).splitlines()[2:5:2] == ["rank 0  predicted  ", "rank 1  predicted  "]
    assert "makespan: -" in text.pair(run(), nothing)


def test_svg_holds_every_event_of_both_in_its_half_of_the_lane() -> None:
    both = {
        "predicted": run(schedule="chimera", ranks=4, count=4),
        "measured": run(1.5, schedule="chimera", ranks=4, count=4, start=7),
    }
    root = ElementTree.fromstring(svg.pair(*both.values(), width=960))
    bars = [(bar.find(f"{SVG}title").text, bar) for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert len(bars) == sum(len(timeline.events) for timeline in both.values())
    longest = both["measured"].makespan
    tops: dict[tuple[str, int], set[float]] = {}
    for name, timeline in both.items():
        for event in timeline.compute:
            bar = next(bar for tip, bar in bars if tip.startswith(f"{name} {event.action}, rank {event.rank}:"))
            assert float(bar.get("x")) == pytest.approx(64 + (event.start - timeline.start) * 880 / longest, abs=0.01)
            assert float(bar.get("width")) == pytest.approx((event.end - event.start) * 880 / longest, abs=0.01)
            assert ("fxc-pale" in bar.get("class")) == (name == "predicted")
            tops.setdefault((name, event.rank), set()).add(float(bar.get("y")))
            height = float(bar.get("height"))
    assert all(len(found) == 1 for found in tops.values())
    rows = sorted((top, rank, name) for (name, rank), (top,) in tops.items())
    assert [(rank, name) for _, rank, name in rows] == [(rank, name) for rank in range(4) for name in ("predicted", "measured")]
    assert all(below - above >= height for (above, *_), (below, *_) in itertools.pairwise(rows))
    lanes = [float(lane.get("y")) for lane in root.iter(f"{SVG}rect") if lane.get("class") == "fxc-idle"]
    assert lanes == [top for top, _, name in rows if name == "predicted"]
    assert float(root.get("height")) > rows[-1][0] + height


def test_a_drawing_of_a_pair() -> None:
    one, two = run(), run(2.0)
    drawing = Drawing((one, two), paired=True)
    assert str(drawing) == repr(drawing) == text.pair(one, two)
    assert drawing._repr_svg_() == svg.pair(one, two)
    entries = json.loads(drawing.to_chrome())["traceEvents"]
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == ["1f1b (predicted)", "1f1b"]
    ends = [max(e["ts"] + e["dur"] for e in entries if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 1)]
    assert ends == [pytest.approx(4e6), pytest.approx(8e6)]


def test_what_cannot_be_a_pair() -> None:
    with pytest.raises(ValueError, match="2 ranks cannot be laid over a measurement of 4"):
        text.pair(run(), run(ranks=4))
    with pytest.raises(ValueError, match="2 ranks cannot be laid over a measurement of 4"):
        svg.pair(run(), run(ranks=4))
    with pytest.raises(ValueError, match="a pair is two timelines, got 1"):
        Drawing((run(),), paired=True)
