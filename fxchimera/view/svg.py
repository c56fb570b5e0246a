"""Timelines as one standalone SVG: one lane a rank, timelines under each other or two in one lane, over one time axis.

Readable in light and dark, and without colour: every computation carries its name where it fits, and the forward's outline
differs from the backward's.  Messages are thin bars under their rank's lane.  Pointing at a bar shows the action and its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fxchimera.errors import ScheduleError
from fxchimera.schedule.timeline import Event, Timeline
from fxchimera.view.labels import comparable, goes_up, label, ratio_text, seconds, summary

__all__ = ["gantt", "pair"]

_MARGIN, _LANE, _HALF, _GAP, _TITLE, _FOOT = 64, 22, 15, 8, 26, 46  # pixels
_KINDS = (
    ("fxc-fd", "forward, down"),
    ("fxc-bd", "backward, down"),
    ("fxc-fu", "forward, up"),
    ("fxc-bu", "backward, up"),
    ("fxc-msg", "message"),
)
_STYLE = """
.fxc{font:12px system-ui,sans-serif;background:#fff}.fxc text{fill:#1b1f24}.fxc
.fxc-in{font-size:10px;fill:#0b0d10;pointer-events:none} .fxc .fxc-idle{fill:#eef0f3}.fxc
.fxc-tick{stroke:#9aa3ad;stroke-width:1}.fxc .fxc-fd{fill:#7fb4f0;stroke:#2a5f9e} .fxc
.fxc-bd{fill:#b9d6f7;stroke:#2a5f9e;stroke-dasharray:3 1.5}.fxc .fxc-fu{fill:#f3b061;stroke:#9a5a0a} .fxc
.fxc-bu{fill:#f9dcb5;stroke:#9a5a0a;stroke-dasharray:3 1.5}.fxc .fxc-msg{fill:#7d8590}.fxc
.fxc-pale{opacity:.45}
@media(prefers-color-scheme:dark){.fxc{background:#15181c}.fxc text{fill:#e6e9ed}.fxc .fxc-idle{fill:#262b31}}
"""


def gantt(*timelines: Timeline, width: int = 960) -> str:
    """Draws timelines under each other over one time axis.

    Args:
        timelines: What to draw, from top to bottom; at least one.
        width: Pixels.

    Raises:
        ScheduleError: No timeline was given.
    """
    if not timelines:
        raise ScheduleError("gantt needs a timeline to draw, got none; simulate(order, costs) makes one")
    scale = _scale(timelines, width)
    body: list[str] = []
    top = 0
    for timeline in timelines:
        body.append(f'<text x="4" y="{top + 17}">{escape(summary(timeline))}</text>')
        top += _TITLE
        body += _lanes(timeline.placement.num_ranks, top, _LANE, width)
        rows = _Rows(top, _LANE + _GAP, _LANE, messages=_LANE + 1)
        body += [_bar(event, timeline, rows, scale) for event in timeline.events]
        top += timeline.placement.num_ranks * rows.pitch
    return _picture("; ".join(map(summary, timelines)), body, top, timelines, width)


def pair(predicted: Timeline, measured: Timeline, *, width: int = 960) -> str:
    """Draws two runs of one order over each other: in every rank's lane the prediction above, pale, and what was measured below.

    If they are not comparable, the prediction has a scale of its own, and the axis is that of the measurement.

    Args:
        predicted: The one.
        measured: The other.
        width: Pixels.

    Raises:
        ScheduleError: They have another number of ranks.
    """
    ratio, ranks = ratio_text(predicted, measured), predicted.placement.num_ranks
    on_axis = (predicted, measured) if comparable(predicted, measured) else (measured,)
    scale = _scale(on_axis, width)
    titles = f"predicted: {summary(predicted)}", f"measured: {summary(measured)}; {ratio}"
    body = [f'<text x="4" y="{17 + 18 * line}">{escape(title)}</text>' for line, title in enumerate(titles)]
    top, pitch = _TITLE + 24, 2 * _HALF + 2 * _GAP
    body += _lanes(ranks, top, 2 * _HALF, width)
    above = _Rows(top, pitch, _HALF, messages=-5, style=" fxc-pale", word="predicted ")
    below = _Rows(top + _HALF, pitch, _HALF, messages=_HALF + 1, word="measured ")
    own = scale if predicted in on_axis else _scale((predicted,), width)
    body += [_bar(event, predicted, above, own) for event in predicted.events]
    body += [_bar(event, measured, below, scale) for event in measured.events]
    return _picture("; ".join(titles), body, top + ranks * pitch, on_axis, width)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where one timeline's bars are: the first rank's at ``top``, the next ``pitch`` below; messages lie ``messages`` off them."""

    top: int
    pitch: int
    height: int
    messages: int
    style: str = ""
    word: str = ""


def _scale(timelines: Sequence[Timeline], width: int) -> float:
    """Pixels a second."""
    longest = max(timeline.makespan for timeline in timelines)
    return (width - _MARGIN - 16) / longest if longest else 0.0


def _picture(title: str, body: list[str], top: int, timelines: Sequence[Timeline], width: int) -> str:
    """The whole SVG: what is drawn, and axis and key below ``top``."""
    longest = max(timeline.makespan for timeline in timelines)
    body += _axis(top, _scale(timelines, width), longest, width)
    body += _key(top + 24, two_way=any(len(timeline.placement.pipes) > 1 for timeline in timelines))
    height = top + _FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fxc" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{escape(title)}</title><style>{escape(_STYLE)}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _lanes(ranks: int, top: int, height: int, width: int) -> Iterator[str]:
    pitch = height + (_GAP if height == _LANE else 2 * _GAP)
    for rank in range(ranks):
        y = top + rank * pitch
        yield f'<text x="4" y="{y + height // 2 + 4}">rank {rank}</text>'
        yield f'<rect class="fxc-idle" x="{_MARGIN}" y="{y}" width="{width - _MARGIN - 16}" height="{height}"/>'


def _bar(event: Event, timeline: Timeline, rows: _Rows, scale: float) -> str:
    """One action; its tooltip has torch's text and its seconds."""
    action, y = event.action, rows.top + event.rank * rows.pitch
    x, long = _MARGIN + (event.start - timeline.start) * scale, (event.end - event.start) * scale
    times = f"{seconds(event.start - timeline.start)} + {seconds(event.end - event.start)}"
    tip = f"<title>{rows.word}{escape(str(action))}, rank {event.rank}: {times}</title>"
    if not action.kind.is_compute:
        place = f'x="{x:.2f}" y="{y + rows.messages}" width="{max(long, 1):.2f}" height="4"'
        return f'<rect class="fxc-msg{rows.style}" {place}>{tip}</rect>'
    style = f"fxc-{'b' if action.kind.is_backward else 'f'}{'u' if goes_up(action, timeline.placement) else 'd'}"
    place = f'x="{x:.2f}" y="{y}" width="{max(long, 0.5):.2f}" height="{rows.height}"'
    bar = f'<rect class="{style}{rows.style}" {place}>{tip}</rect>'
    name = label(action, timeline.placement)
    if long < 7 * len(name):
        return bar
    return bar + f'<text class="fxc-in" x="{x + long / 2:.2f}" y="{y + rows.height // 2 + 4}" text-anchor="middle">{name}</text>'


def _axis(top: int, scale: float, longest: float, width: int) -> Iterator[str]:
    yield f'<line class="fxc-tick" x1="{_MARGIN}" y1="{top}" x2="{width - 16}" y2="{top}"/>'
    for part in range(5):
        x = _MARGIN + longest * scale * part / 4
        yield f'<line class="fxc-tick" x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 4}"/>'
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        yield f'<text x="{x:.2f}" y="{top + 17}" text-anchor="{anchor}">{seconds(longest * part / 4)}</text>'


def _key(top: int, *, two_way: bool) -> Iterator[str]:
    x = _MARGIN
    for style, name in _KINDS:
        if two_way or not style.endswith("u"):
            yield f'<rect class="{style}" x="{x}" y="{top}" width="14" height="12"/>'
            yield f'<text x="{x + 19}" y="{top + 11}">{name}</text>'
            x += 40 + 7 * len(name)
