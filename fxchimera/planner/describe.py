"""A plan for machines: one JSON object."""

from __future__ import annotations

from fxchimera.planner.table import Plan
from fxchimera_passes.plan import Stage

__all__ = ["plan_as_dict"]


def plan_as_dict(plan: Plan) -> dict[str, object]:
    """The figures of a plan: seconds and bytes, of a stage for one micro-batch and of a rank for a step."""
    place = plan.placement
    caps = plan.caps or (None,) * place.num_ranks
    certificate = plan.certificate
    share = certificate.bubble / certificate.makespan if certificate.makespan else 0.0
    return {
        "num_stages": place.num_stages,
        "num_ranks": place.num_ranks,
        "n_microbatches": place.n_microbatches,
        "schedule": plan.schedule,
        "bottleneck_seconds": plan.cut.bottleneck_seconds,
        "bound_seconds": plan.cut.bound_seconds,
        "gap": plan.gap,
        "excess": plan.excess,
        "stages": [
            {**_stage_as_dict(stage), "ranks": [ranks[stage.index] for ranks in place.pipes], "modules": span}
            for stage, span in zip(plan.stages, plan.spans, strict=True)
        ],
        "memory": [{**need.as_dict(), "cap": cap} for need, cap in zip(plan.memory, caps, strict=True)],
        "step_seconds": plan.step_seconds,
        "certificate": {**certificate.as_dict(), "bubble_share": share},
        "notes": list(plan.cut.notes),
        "report": _report_as_dict(plan),
    }


def _stage_as_dict(stage: Stage) -> dict[str, object]:
    return {
        "stage": stage.index,
        "nodes": len(stage.nodes),
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "parameter_bytes": stage.parameter_bytes,
        "owned_parameters": len(stage.owned),
        "activation_bytes": stage.activation_bytes,
        "recompute": stage.recompute,
        "recompute_seconds": stage.recompute_seconds,
        "recompute_bytes": stage.recompute_bytes,
        "kept_whole": list(stage.kept_whole),
        "sent": [
            {
                "name": value.name,
                "shape": list(value.meta.shape),
                "dtype": str(value.meta.dtype).removeprefix("torch."),
                "bytes": value.meta.bytes,
            }
            for value in stage.sent
        ],
    }


def _report_as_dict(plan: Plan) -> dict[str, object]:
    """Which modules were opened and closed and why, what the recording holds for, and notes."""
    report = plan.report
    return {
        "operations": report.operations,
        "opened": dict(report.opened),
        "closed": dict(report.closed),
        "guards": [f"{guard.description} {guard.line}".strip() for guard in report.guards],
        "notes": list(report.notes),
        "text": str(report),
    }
