"""In which rounds the search anneals: many plans briefly first, then the best one with what is left of the budget."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "THOROUGH", "WIDE", "Round"]


@dataclass(frozen=True, slots=True)
class Round:
    """A round of annealing.

    Args:
        keep: How many plans are annealed.
        share: What each may use of the budget that is left.
        hot: First temperature.
        anew: Begin again from what rules, papers and beams gave instead of what was annealed so far.
        whole: Without the mirror symmetry (fold.py).
        toggles: Share of the moves that fuse or split a backward, where splitting has a price.
    """

    keep: int
    share: float
    hot: float
    anew: bool = False
    whole: bool = False
    toggles: float = 0.15


DEFAULT = (Round(6, 0.06, 0.03), Round(2, 0.25, 0.03), Round(1, 0.7, 0.03), Round(1, 1.0, 0.03, whole=True))
# Little memory or few operations: good orders are far from each other, so many hot starts.
WIDE = (
    Round(4, 0.03, 0.03),
    Round(4, 0.05, 3.0, anew=True, whole=True),
    Round(3, 0.06, 0.3, anew=True, whole=True),
    Round(3, 0.06, 3.0, anew=True),
    Round(2, 0.15, 1.0, whole=True),
    Round(2, 0.2, 0.1),
    Round(1, 1.0, 0.03, whole=True),
)
THOROUGH = (
    Round(6, 0.03, 0.03, anew=True),
    Round(6, 0.04, 0.1, anew=True),
    Round(4, 0.06, 0.3, anew=True),
    Round(4, 0.1, 0.1),
    Round(2, 0.25, 0.03),
    Round(1, 0.7, 0.03),
    Round(1, 1.0, 0.03, whole=True),
)
