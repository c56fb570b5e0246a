"""Pictures of timelines: text against pictures drawn by hand, SVG and Chrome traces by reading them back."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from fxchimera.schedule import Action, Costs, Event, SyncEdge, Timeline, lower, make_order, one_way, read_csv, simulate
from fxchimera.view import Drawing, chrome, svg, text

SVG = "{http://www.w3.org/2000/svg}"


def predicted(schedule="chimera", depth=4, number=4, latency=0.0, backward=2.0):
    order = make_order(schedule, depth, number)
    sync = [SyncEdge(stage, depth - 1 - stage, stage) for stage in range(depth)] if schedule == "chimera" else []
    return simulate(lower(order, sync=sync), Costs.uniform(depth, 1.0, backward, latency))


def test_text_of_chimera():
    """D=4, N=4, F=1, B=2: three characters a second; times found by hand from the order."""
    assert text.gantt(predicted()) == (
        "chimera: makespan 16 s, bubble 25.0% (with a barrier)\n"
        "rank 0  F0-F1-...f2-b2====f3-b3====...B0====......B1====\n"
        "rank 1  ...F0-f2-F1-f3-...b2====B0====b3====B1====......\n"
        "rank 2  ...f2-F0-f3-F1-...B0====b2====B1====b3====......\n"
        "rank 3  f2-f3-...F0-B0====F1-B1====...b2====......b3====\n"
        "F- forward, B= backward, . idle; capitals: down pipe, small: up pipe\n"
    )


def test_text_of_one_way():
    """D=2, N=3, F=B=1: bubble (D-1)(F+B) = 2 of 8 seconds."""
    assert text.gantt(predicted("1f1b", 2, 3, backward=1.0)) == (
        "1f1b: makespan 8 s, bubble 25.0% (with a barrier)\n"
        "rank 0  F0-F1-...B0=F2-B1=...B2=\n"
        "rank 1  ...F0-B0=F1-B1=F2-B2=...\n"
        "F- forward, B= backward, . idle\n"
    )


def test_text_of_split_backward():
    order = read_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n", one_way(2, 1), "split")
    assert text.gantt(simulate(order, Costs.uniform(2))).splitlines()[1:3] == ["rank 0  F0-......I0=W0=", "rank 1  ...F0-I0=W0=..."]


def test_text_when_there_is_room_for_one_letter_only():
    """16 slots in 16 characters: a, b go down and n, o up."""
    assert text.gantt(predicted(), width=24).splitlines()[1:] == [
        "rank 0  ab.nNNoOO.AA..BB",
        "rank 1  .anbo.NNAAOOBB..",
        "rank 2  .naob.AANNBBOO..",
        "rank 3  no.aAAbBB.NN..OO",
        "one letter a micro-batch, small: forward, capital: backward, . idle; a-m: down pipe, n-z: up pipe",
    ]


@pytest.mark.parametrize("unit", [1e-6, 0.25e-3, 0.1, 1 / 3, 7.0])
def test_text_is_exact_in_any_unit(unit):
    timeline = predicted("chimera", 4, 8)
    scaled = Timeline(
        timeline.name,
        timeline.placement,
        tuple(Event(event.rank, event.action, event.start * unit + 5, event.end * unit + 5) for event in timeline.events),
    )
    assert text.gantt(scaled).splitlines()[1:] == text.gantt(timeline).splitlines()[1:]


@pytest.mark.parametrize("width", [20, 57, 100, 300])
def test_text_of_uneven_times_keeps_to_the_width(width):
    timeline = predicted("chimera", 8, 32, latency=0.0371, backward=1.7)
    lines = text.gantt(timeline, width=width).splitlines()
    assert {len(line) for line in lines[1:9]} == {width}
    if width == 300:  # every micro-batch leaves a mark on every rank
        assert all(set("abcdefghijklm") <= set(line.lower()[8:]) for line in lines[1:9])


def test_text_of_nothing():
    assert text.gantt(Timeline("nothing", one_way(2, 1), ())).splitlines()[1:3] == ["rank 0  ", "rank 1  "]


@pytest.mark.parametrize(
    ("value", "wanted"), [(16.0, "16 s"), (0.01923, "19.2 ms"), (2.5e-6, "2.5 us"), (0.0, "0 us"), (1234.0, "1234 s")]
)
def test_units(value, wanted):
    action = Action.parse("0F0")
    assert f"makespan {wanted}," in text.gantt(Timeline("one", one_way(1, 1), (Event(0, action, 0.0, value),)))


def test_svg_holds_every_event_to_scale():
    timeline = predicted(latency=0.25)
    root = ElementTree.fromstring(svg.gantt(timeline, width=960))
    assert (root.tag, root.get("role"), root.get("width")) == (f"{SVG}svg", "img", "960")
    assert root.find(f"{SVG}title").text.startswith("chimera: makespan")
    bars = {bar.find(f"{SVG}title").text: bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None}
    assert len(bars) == len(timeline.events)
    for event in timeline.compute:
        bar = next(bar for tip, bar in bars.items() if tip.startswith(f"{event.action}, rank {event.rank}:"))
        assert float(bar.get("x")) == pytest.approx(64 + event.start * 880 / timeline.makespan, abs=0.01)
        assert float(bar.get("width")) == pytest.approx((event.end - event.start) * 880 / timeline.makespan, abs=0.01)
    words = {node.text for node in root.iter(f"{SVG}text")}
    assert {"rank 0", "rank 3", "F0", "b3", "forward, up", "message"} <= words


def test_svg_escapes_names():
    timeline = Timeline('<b> & "co"', one_way(1, 1), predicted("1f1b", 1, 1).events)
    root = ElementTree.fromstring(svg.gantt(timeline))
    assert root.find(f"{SVG}title").text.startswith('<b> & "co": makespan')


def test_svg_of_two_timelines_shares_the_axis():
    short, long = predicted("chimera", 2, 2), predicted("1f1b", 2, 2, backward=4.0)
    root = ElementTree.fromstring(svg.gantt(short, long))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    firsts = [float(bar.get("width")) for bar in bars if bar.find(f"{SVG}title").text.startswith("0F0, rank 0")]
    assert firsts == [pytest.approx(880 / long.makespan, abs=0.01)] * 2
    with pytest.raises(ValueError, match="needs a timeline"):
        svg.gantt()


def test_chrome_trace():
    timeline = predicted(latency=0.25)
    entries = json.loads(chrome.trace({"predicted": timeline, "again": timeline}))["traceEvents"]
    assert all(type(entry["pid"]) is int and type(entry["tid"]) is int for entry in entries)
    names = {(entry["pid"]): entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {0: "predicted", 1: "again"}
    threads = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    for pid in names:
        found = sorted((e["name"], e["args"]["rank"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X" and e["pid"] == pid)
        wanted = sorted((str(e.action), e.rank, e.start * 1e6, (e.end - e.start) * 1e6) for e in timeline.events)
        assert found == wanted
    rows = {}
    for entry in entries:
        if entry["ph"] == "X":
            title = threads[entry["pid"], entry["tid"]]
            assert re.fullmatch(rf"rank {entry['args']['rank']}( messages \d+)?", title)
            assert ("messages" in title) == ("_" in entry["name"])
            rows.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    for row in rows.values():  # events of one thread must not overlap
        row.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(row))
    one = next(entry for entry in entries if entry["name"] == "3F2")
    assert one["args"] == {"rank": 0, "stage": 3, "microbatch": 2, "pipe": "up"}


def test_drawing_shows_itself():
    one, two = predicted(), predicted(latency=0.5)
    drawing = Drawing((one, two))
    assert str(drawing) == repr(drawing) == text.gantt(one) + "\n" + text.gantt(two)
    assert drawing._repr_svg_() == drawing.to_svg() == svg.gantt(one, two)
    processes = [
        entry["args"]["name"] for entry in json.loads(drawing.to_chrome())["traceEvents"] if entry["name"] == "process_name"
    ]
    assert processes == ["chimera", "chimera 2"]
    with pytest.raises(ValueError, match="needs a timeline"):
        Drawing(())
