"""What to do with a step whose loss is nan or infinite: every rank knows all losses, so every rank decides the same."""

from __future__ import annotations

from typing import Literal, get_args

from fxchimera.errors import FxChimeraError, NonFiniteLossError
from fxchimera.runtime.steps.results import Losses
from fxchimera.schedule.placement import Placement

__all__ = ["NanPolicy", "check_policy", "not_finite"]

NanPolicy = Literal["raise", "skip", "ignore"]

_MOST_NAMED = 4


def check_policy(policy: str) -> None:
    """Refuse a policy that does not exist.

    Raises:
        FxChimeraError: The message lists those that do.
    """
    if policy not in get_args(NanPolicy):
        raise FxChimeraError(
            f"nan={policy!r}, but a loss that is not finite can be met by {', '.join(map(repr, get_args(NanPolicy)))}"
        )


def not_finite(losses: Losses, step: int, placement: Placement) -> NonFiniteLossError | None:
    """Return the error that names the micro-batches whose losses are nan or infinite; None when the batch's loss is finite."""
    if losses.total.isfinite():
        return None
    found = losses.not_finite
    named = [f"{_name(m, placement, len(losses.weights))} ({loss})" for m, loss in list(found.items())[:_MOST_NAMED]]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    where = f"in {', '.join(named)}{more}" if found else "though every micro-batch's is finite"
    return NonFiniteLossError(
        f"the loss of step {step} is {float(losses.total)}, {where}; gradients and parameters are as before the step. "
        'pipeline(..., nan="skip") goes on without such steps, nan="ignore" lets them count'
    )


def _name(number: int, placement: Placement, micro_batches: int) -> str:
    pipeline, microbatch = divmod(number, placement.n_microbatches)
    name = f"micro-batch {microbatch} ({placement.pipe_name(placement.pipe_of[microbatch])})"
    return f"{name} of pipeline {pipeline}" if micro_batches > placement.n_microbatches else name
