"""A picture that shows itself: text in a terminal, SVG in a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.timeline import Timeline
from fxchimera.view import chrome, svg, text

__all__ = ["Drawing"]


@dataclass(frozen=True, slots=True, repr=False)
class Drawing:
    """Timelines to be shown together, for instance a predicted and a measured one.

    Args:
        timelines: From top to bottom, at least one.
        paired: They are two, a prediction and what was measured, and are drawn over each other.

    Raises:
        ScheduleError: There is no timeline, or a pair is not two.
    """

    timelines: tuple[Timeline, ...]
    paired: bool = False

    def __post_init__(self) -> None:
        if not self.timelines:
            raise ScheduleError("a Drawing needs a timeline, got none; simulate(order, costs) makes one")
        if self.paired and len(self.timelines) != 2:
            raise ScheduleError(f"a pair is two timelines, got {len(self.timelines)}; give a prediction and what was measured")

    def __str__(self) -> str:
        if self.paired:
            return text.pair(*self.timelines)
        return "\n".join(text.gantt(timeline) for timeline in self.timelines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def to_svg(self, *, width: int = 960) -> str:
        """A standalone SVG, ``width`` pixels wide."""
        draw = svg.pair if self.paired else svg.gantt
        return draw(*self.timelines, width=width)

    def to_chrome(self) -> str:
        """Chrome's trace JSON, a process for each timeline; a name that comes again gets a number."""
        named: dict[str, Timeline] = {}
        for timeline in self.timelines:
            name, number = timeline.name, 2
            if self.paired and not named:
                name = f"{name} (predicted)"
            while name in named:
                name, number = f"{timeline.name} {number}", number + 1
            named[name] = timeline
        return chrome.trace(named)
