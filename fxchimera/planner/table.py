"""The plan as a user reads it: which stage is on which rank, what it costs, and what crosses each cut."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.schedule.placement import Placement
from fxchimera.schedule.profile import Costs
from fxchimera_passes.captured import CaptureReport
from fxchimera_passes.plan import BoundaryValue, Stage, StagePlan

__all__ = ["Plan", "costs_of", "readable_bytes"]

_HEADER = ("stage", "ranks", "cost", "F ms", "B ms", "parameters", "sends", "what crosses to the next stage")


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The cut of a model into stages and where they run; prints as a table and renders in a notebook.

    ``stages`` has the figures: ``forward_seconds``, ``backward_seconds``, ``parameter_bytes``, ``sent``, ``owned`` and more.
    ``report`` tells which modules the capture opened and closed, and why.
    """

    cut: StagePlan
    placement: Placement
    schedule: str
    report: CaptureReport

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, first to last."""
        return self.cut.stages

    @property
    def gap(self) -> float:
        """How far the heaviest stage is from the proven bound of any legal cut (0.05 is 5 %)."""
        return self.cut.gap

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self._title(), lines[0], "-" * len(lines[0]), *lines[1:]])

    __repr__ = __str__  # a shell shows the table, not the records behind it

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEADER)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows())
        return f"<p>{html.escape(self._title())}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _title(self) -> str:
        place = self.placement
        return (
            f"{len(self.stages)} stages on {place.num_ranks} ranks, {place.n_microbatches} micro-batches, "
            f"schedule {self.schedule}; "
            f"heaviest stage within {100 * self.gap:.1f} % of the proven bound"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        total = sum(stage.cost_seconds for stage in self.stages) or 1.0
        return [
            (
                str(stage.index),
                ", ".join(
                    f"{ranks[stage.index]} ({self.placement.pipe_name(pipe)})" for pipe, ranks in enumerate(self.placement.pipes)
                ),
                f"{100 * stage.cost_seconds / total:.1f} %",
                f"{1e3 * stage.forward_seconds:.3f}",
                f"{1e3 * stage.backward_seconds:.3f}",
                readable_bytes(stage.parameter_bytes),
                readable_bytes(_bytes(stage.sent)),
                ", ".join(_crossing(value) for value in stage.sent) or "-",
            )
            for stage in self.stages
        ]


def costs_of(stages: Sequence[Stage], *, latency: float = 0.0) -> Costs:
    """Return the schedule's view of the stages: seconds by stage, the backward in two halves, and the bytes of each boundary."""
    half = tuple(stage.backward_seconds / 2 for stage in stages)
    return Costs(
        forward=tuple(stage.forward_seconds for stage in stages),
        input_grad=half,
        weight_grad=half,
        latency=latency,
        boundary_bytes=tuple(_bytes(stage.sent) for stage in stages[:-1]),
    )


def readable_bytes(count: int) -> str:
    """Return a size for people: ``1.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _bytes(values: Sequence[BoundaryValue]) -> int:
    return sum(value.meta.bytes for value in values)


def _crossing(value: BoundaryValue) -> str:
    dtype = str(value.meta.dtype).removeprefix("torch.")
    return f"{value.name} {dtype}{list(value.meta.shape)}"
