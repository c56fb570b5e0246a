"""What ``pipe.profile()`` returns: measured seconds of every stage and link, and how well they predict a step."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from fxchimera.planner.link import Link
from fxchimera.planner.rows import Rows, as_html, as_text
from fxchimera.planner.table import Plan
from fxchimera.schedule.measurement import LinkTimes, Measurement, StageTimes

__all__ = ["Profile"]

_STAGES = ("stage", "rank", "F ms", "B ms", "F of a split ms", "I ms", "W ms", "split price")
_LINKS = ("ranks", "small message us", "large message ms", "large message bytes", "bytes per second")


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Profile:
    """Seconds of one micro-batch on every stage, of messages, and of a step; prints as a table and renders in a notebook.

    Attributes:
        measurement: The stages, in order, and the links between neighbouring ranks.
        ranks: The rank of each stage, of the down pipe.
        schedule: The order of the steps.
        predicted: Seconds of a step, simulated from ``measurement``.
        measured: Seconds of a step as it ran, the median of the rounds.
        shared: The ranks are threads of one process.
    """

    measurement: Measurement
    ranks: tuple[int, ...]
    schedule: str
    predicted: float
    measured: float
    shared: bool

    @classmethod
    def of(cls, found: Measurement, plan: Plan, predicted: float, measured: float, *, shared: bool) -> Profile:
        """Put a measurement beside the plan that ran."""
        return cls(
            measurement=found,
            ranks=plan.placement.pipes[0],
            schedule=plan.schedule,
            predicted=predicted,
            measured=measured,
            shared=shared,
        )

    @property
    def stages(self) -> tuple[StageTimes, ...]:
        """Seconds of one micro-batch, by stage."""
        return self.measurement.stages

    @property
    def links(self) -> tuple[LinkTimes, ...]:
        """Messages between neighbouring ranks, by pair."""
        return self.measurement.links

    @property
    def link(self) -> Link:
        """The slowest of the links, which is planned with."""
        return Link(self.measurement.latency, self.measurement.bytes_per_second)

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds of a step: below 1 where something is not in the prediction."""
        return self.predicted / self.measured if self.measured else math.nan

    def __str__(self) -> str:
        return "\n".join([*as_text(self._stage_rows()), "", *(as_text(self._link_rows()) if self.links else ()), *self._words()])

    __repr__ = __str__  # a shell shows the table, not the records behind it

    def _repr_html_(self) -> str:
        tables = as_html(self._stage_rows()) + (as_html(self._link_rows()) if self.links else "")
        return tables + "".join(f"<p>{html.escape(line)}</p>" for line in self._words())

    def _words(self) -> list[str]:
        step = (
            f"a step ({self.schedule}): predicted {1e3 * self.predicted:.4g} ms, measured {1e3 * self.measured:.4g} ms, "
            f"predicted / measured {self.ratio:.3f}"
        )
        how = "stages were timed one at a time, while the other ranks were idle"
        if self.shared:
            how += "; the ranks are threads of one process, so in a step they share its cores and the interpreter"
        return [step, how]

    def _stage_rows(self) -> Rows:
        rows = [
            (
                str(stage),
                str(rank),
                *(
                    f"{1e3 * seconds:.4g}"
                    for seconds in (times.forward, times.backward, times.split_forward, times.input_grad, times.weight_grad)
                ),
                f"{100 * (sum(times.halves) / times.backward - 1):.1f} %" if times.backward else "-",
            )
            for stage, (rank, times) in enumerate(zip(self.ranks, self.stages, strict=True))
        ]
        return [_STAGES, *rows]

    def _link_rows(self) -> Rows:
        rows = [
            (
                f"{link.ranks[0]} - {link.ranks[1]}",
                f"{1e6 * link.small:.4g}",
                f"{1e3 * link.large:.4g}",
                str(link.large_bytes),
                f"{link.bytes_per_second:.3g}",
            )
            for link in self.links
        ]
        return [_LINKS, *rows]
