"""Timelines as one standalone SVG: one lane a rank, several timelines under each other over one time axis.

Readable in light and dark, and without colour: every computation carries its name where it fits, and the forward's outline
differs from the backward's.  Messages are thin bars under their rank's lane.  Pointing at a bar shows the action and its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from fxchimera.schedule.timeline import Event, Timeline
from fxchimera.view.labels import goes_up, label, seconds, summary

__all__ = ["gantt"]

_MARGIN, _LANE, _GAP, _TITLE, _FOOT = 64, 22, 8, 26, 46  # pixels
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
.fxc-bu{fill:#f9dcb5;stroke:#9a5a0a;stroke-dasharray:3 1.5}.fxc .fxc-msg{fill:#7d8590}
@media(prefers-color-scheme:dark){.fxc{background:#15181c}.fxc text{fill:#e6e9ed}.fxc .fxc-idle{fill:#262b31}}
"""


def gantt(*timelines: Timeline, width: int = 960) -> str:
    """Draws timelines over one time axis, for instance a predicted one over a measured one.

    Args:
        timelines: What to draw, from top to bottom; at least one.
        width: Pixels.

    Raises:
        ValueError: No timeline was given.
    """
    if not timelines:
        raise ValueError("gantt needs a timeline to draw")
    longest = max(timeline.makespan for timeline in timelines)
    scale = (width - _MARGIN - 16) / longest if longest else 0.0
    body: list[str] = []
    top = 0
    for timeline in timelines:
        body += _lanes(timeline, top, scale, width)
        top += _TITLE + timeline.placement.num_ranks * (_LANE + _GAP)
    body += _axis(top, scale, longest, width)
    body += _key(top + 24, two_way=any(len(timeline.placement.pipes) > 1 for timeline in timelines))
    height = top + _FOOT
    name = escape("; ".join(map(summary, timelines)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fxc" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{name}</title><style>{escape(_STYLE)}</style>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _lanes(timeline: Timeline, top: int, scale: float, width: int) -> Iterator[str]:
    yield f'<text x="4" y="{top + 17}">{escape(summary(timeline))}</text>'
    for rank in range(timeline.placement.num_ranks):
        y = _lane(top, rank)
        yield f'<text x="4" y="{y + 15}">rank {rank}</text>'
        yield f'<rect class="fxc-idle" x="{_MARGIN}" y="{y}" width="{width - _MARGIN - 16}" height="{_LANE}"/>'
    for event in timeline.events:
        yield _bar(event, timeline, _lane(top, event.rank), scale)


def _lane(top: int, rank: int) -> int:
    return top + _TITLE + rank * (_LANE + _GAP)


def _bar(event: Event, timeline: Timeline, lane: int, scale: float) -> str:
    """One action; its tooltip has torch's text and its seconds."""
    action = event.action
    x, long = _MARGIN + (event.start - timeline.start) * scale, (event.end - event.start) * scale
    begin = event.start - timeline.start
    tip = f"<title>{escape(str(action))}, rank {event.rank}: {seconds(begin)} + {seconds(event.end - event.start)}</title>"
    if not action.kind.is_compute:
        return f'<rect class="fxc-msg" x="{x:.2f}" y="{lane + _LANE + 1}" width="{max(long, 1):.2f}" height="4">{tip}</rect>'
    style = f"fxc-{'b' if action.kind.is_backward else 'f'}{'u' if goes_up(action, timeline.placement) else 'd'}"
    bar = f'<rect class="{style}" x="{x:.2f}" y="{lane}" width="{max(long, 0.5):.2f}" height="{_LANE}">{tip}</rect>'
    name = label(action, timeline.placement)
    if long < 7 * len(name):
        return bar
    return bar + f'<text class="fxc-in" x="{x + long / 2:.2f}" y="{lane + 15}" text-anchor="middle">{name}</text>'


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
