"""What a coarse cut costs, in words for its warning."""

from __future__ import annotations

from fxchimera.schedule.order import Order
from fxchimera_passes.plan import StagePlan

__all__ = ["idle"]


def idle(cut: StagePlan, order: Order) -> str:
    """Say how many ranks have nothing to compute."""
    place = order.placement
    idle = sum(not any(cut.stages[stage].nodes for _, stage in place.replicas(rank)) for rank in range(place.num_ranks))
    return (
        f"Now {idle} of {place.num_ranks} ranks compute nothing. To refuse such a cut: "
        'warnings.filterwarnings("error", category=fxchimera.CoarseCutWarning)'
    )
