"""The plan as a user reads it: stages and ranks, what each costs, what crosses each cut, memory, and the order's certificate."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.planner.caps import readable_bytes
from fxchimera.planner.link import Measures
from fxchimera.planner.memory import RankMemory
from fxchimera.planner.pace import step_seconds
from fxchimera.planner.rows import Rows, as_html, as_text
from fxchimera.planner.spans import spans_of
from fxchimera.schedule.certificate import Certificate, certify
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.problem import Problem
from fxchimera.schedule.profile import Costs, SyncEdge
from fxchimera_passes.captured import Captured
from fxchimera_passes.plan import NONE, BoundaryValue, Load, Stage, StagePlan
from fxchimera_passes.report import Explanation, explain

__all__ = ["Plan", "costs_of"]

_STAGES = (
    "stage",
    "ranks",
    "modules",
    "cost",
    "F ms",
    "B ms",
    "parameters",
    "activations",
    "sends",
    "what crosses to the next stage",
)
_RANKS = ("rank", "holds at most", "parameters", "gradients", "optimizer", "mirrors", "activations", "messages", "memory")


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Plan:
    """The cut of a model into stages and where they run; prints as a table and renders in a notebook.

    ``stages`` has the figures of a stage for one micro-batch: ``forward_seconds``, ``backward_seconds``, ``parameter_bytes``,
    ``activation_bytes``, ``sent``, ``owned`` and more.  ``memory`` has the bytes of every rank for a step, ``caps`` what they may
    be (empty: no cap).  ``spans`` tells what part of the model a stage is.  ``report`` explains the recording: modules
    opened and closed and why, what it holds for, constants, what stays together, what is computed again; it prints as a text.

    ``order`` is what every rank does, computations only; given as ``schedule=`` it makes the same step again.  ``certificate`` has
    its makespan under ``costs``, with a proven lower bound; ``measures`` is what the costs take for granted about the machine.
    """

    cut: StagePlan
    order: Order
    costs: Costs
    certificate: Certificate
    report: Explanation
    memory: tuple[RankMemory, ...]
    caps: tuple[int, ...]
    spans: tuple[str, ...]
    measures: Measures

    @classmethod
    def of(
        cls,
        captured: Captured,
        cut: StagePlan,
        order: Order,
        memory: tuple[RankMemory, ...],
        caps: tuple[int, ...] = (),
        problem: Problem | None = None,
        measures: Measures | None = None,
        sync: tuple[SyncEdge, ...] = (),
    ) -> Plan:
        """The plan of a cut for the order that will run it; ``problem`` has the limits it was searched in."""
        known = measures or Measures()
        costs = costs_of(cut.stages, known, sync)
        return cls(
            cut=cut,
            order=order,
            costs=costs,
            certificate=certify(order, costs, problem=problem),
            report=explain(captured, cut),
            memory=memory,
            caps=caps,
            spans=spans_of(captured, cut),
            measures=known,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, first to last."""
        return self.cut.stages

    @property
    def placement(self) -> Placement:
        """Where the stages are, and which way each micro-batch goes."""
        return self.order.placement

    @property
    def schedule(self) -> str:
        """The order's name."""
        return self.order.name

    @property
    def gap(self) -> float:
        """How far the heaviest stage is from the proven bound of any legal cut (0.05 is 5 %)."""
        return self.cut.gap

    @property
    def excess(self) -> float:
        """How much more than the mean the busiest rank computes in a step (0.05 is 5 %); its stages may differ in size."""
        place = self.placement
        work = [
            sum(len(place.microbatches(pipe)) * self.stages[stage].cost_seconds for pipe, stage in place.replicas(rank))
            for rank in range(place.num_ranks)
        ]
        mean = sum(work) / len(work)
        return max(work) / mean - 1.0 if mean else 0.0

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step, what mirrors and owners exchange included, which the certificate leaves out."""
        return step_seconds(self.order, self.costs)

    def __str__(self) -> str:
        stages, ranks = as_text(self._stage_rows()), as_text(self._rank_rows())
        lines = [self._title(), *stages, *self._recomputed(), "", self._memory_title(), *ranks, "", str(self.certificate)]
        return "\n".join([*lines, *self._exchange()])

    __repr__ = __str__  # a shell shows the table, not the records behind it

    def _repr_html_(self) -> str:
        tables = ((self._title(), self._stage_rows()), ("\n".join([*self._recomputed(), self._memory_title()]), self._rank_rows()))
        shown = "".join(f"<p>{html.escape(title)}</p>{as_html(rows)}" for title, rows in tables)
        return shown + "".join(f"<p>{html.escape(line)}</p>" for line in (str(self.certificate), *self._exchange()))

    def _title(self) -> str:
        place = self.placement
        return (
            f"{len(self.stages)} stages on {place.num_ranks} ranks, {place.n_microbatches} micro-batches, "
            f"schedule {self.schedule}; busiest rank {100 * self.excess:.1f} % above the mean, "
            f"heaviest stage within {100 * self.gap:.1f} % of the proven bound"
        )

    def _exchange(self) -> list[str]:
        size = sum(edge.bytes for edge in self.costs.sync)
        what = f"{readable_bytes(size)} of parameters that mirrors get, and of gradients that they give back"
        return [f"a step takes {self.step_seconds:.6g} s with {what}"] if self.costs.sync else []

    def _recomputed(self) -> list[str]:
        """A line for each stage that computes a part of its forward again."""
        return [
            f'stage {stage.index} recomputes "{stage.recompute}": {1e3 * stage.recompute_seconds:.4g} ms of B, which needs '
            f"{readable_bytes(stage.recompute_bytes)} for a moment"
            + (
                f"; kept: {stage.kept_whole[0]}" + (f" and {len(stage.kept_whole) - 1} more" if stage.kept_whole[1:] else "")
                if stage.kept_whole
                else ""
            )
            for stage in self.stages
            if stage.recompute != NONE
        ]

    def _memory_title(self) -> str:
        most = readable_bytes(max(need.total for need in self.memory))
        allowed = sorted(set(self.caps))
        caps = " to ".join(readable_bytes(size) for size in (allowed[:1] + allowed[1:][-1:]))
        return f"memory: a rank needs up to {most}" + (f", and may have {caps}" if caps else "")

    def _stage_rows(self) -> Rows:
        total = sum(stage.cost_seconds for stage in self.stages) or 1.0
        rows = [
            (
                str(stage.index),
                ", ".join(f"{ranks[stage.index]} ({self.placement.pipe_name(p)})" for p, ranks in enumerate(self.placement.pipes)),
                span,
                f"{100 * stage.cost_seconds / total:.1f} %",
                f"{1e3 * stage.forward_seconds:.4g}",
                f"{1e3 * stage.backward_seconds:.4g}",
                readable_bytes(stage.parameter_bytes),
                readable_bytes(stage.activation_bytes),
                readable_bytes(_bytes(stage.sent)),
                ", ".join(_crossing(value) for value in stage.sent) or "-",
            )
            for stage, span in zip(self.stages, self.spans, strict=True)
        ]
        return [_STAGES, *rows]

    def _rank_rows(self) -> Rows:
        rows = [
            (
                str(need.rank),
                ", ".join(f"{count} of stage {stage} ({self.placement.pipe_name(p)})" for p, stage, count in need.in_flight),
                *(
                    readable_bytes(size)
                    for size in (
                        need.parameters,
                        need.gradients,
                        need.optimizer,
                        need.mirrors,
                        need.activations + need.recomputation,
                        need.messages,
                        need.total,
                    )
                ),
            )
            for need in self.memory
        ]
        return [_RANKS, *rows]


def costs_of(stages: Sequence[Stage] | Sequence[Load], measures: Measures | None = None, sync: tuple[SyncEdge, ...] = ()) -> Costs:
    """Return the schedule's view of the stages: seconds by stage, whole backwards and their halves, bytes of each boundary.

    ``sync`` is what mirrors and owners exchange.
    """
    known = measures or Measures()
    halves = [
        (stage.recompute_seconds + first, second)  # what is run again, is run for the input gradient
        for stage in stages
        for first, second in [
            known.halves(stage.forward_seconds, stage.backward_seconds - stage.recompute_seconds, stage.deferrable_seconds)
        ]
    ]
    return Costs(
        forward=tuple(stage.forward_seconds for stage in stages),
        input_grad=tuple(first for first, _ in halves),
        weight_grad=tuple(second for _, second in halves),
        backward=tuple(stage.backward_seconds for stage in stages),
        latency=known.link.latency,
        bytes_per_second=known.link.bytes_per_second,
        boundary_bytes=tuple(stage.sent_bytes for stage in stages[:-1]),
        sync_bytes_per_second=known.link.bytes_per_second,
        sync=sync,
    )


def _bytes(values: Sequence[BoundaryValue]) -> int:
    return sum(value.meta.bytes for value in values)


def _crossing(value: BoundaryValue) -> str:
    dtype = str(value.meta.dtype).removeprefix("torch.")
    return f"{value.name} {dtype}{list(value.meta.shape)}"
