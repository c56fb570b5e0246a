"""One line of the report on reliability: a goal, what was measured, and its bar."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One goal: what was measured, how often, the worst figure and its bar, in ``unit``."""

    goal: str
    what: str
    count: int
    worst: float
    bar: float
    unit: str

    def __str__(self) -> str:
        verdict = "met" if self.worst <= self.bar else "MISSED"
        return f"{self.goal:4} {self.what:68} {self.count:6} {self.worst:10.3g} {self.bar:10.3g} {self.unit:9} {verdict}"
