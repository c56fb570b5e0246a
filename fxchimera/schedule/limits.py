"""What a search may use, and what it gives back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.bounds import Bound
from fxchimera.schedule.certificate import Certificate
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs

__all__ = ["Found", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an order may use.

    Args:
        peak: Most activations a rank holds, in micro-batches of 1/D of the model; None for no cap.
        capacity: By rank, the most bytes of activations, instead of ``peak``.
        activation_bytes: By stage, of D or of 2D as in the costs, the bytes that a micro-batch's activations take; needed with
            ``capacity``.
        copies: Copies of the weights.
        chunks: Stages of a pipe on a rank; 1 cuts the model into D stages, 2 allows V shapes, which cut it into 2D.
        split: Whether backwards may be split in input and weight gradients.
        shapes: Names of the shapes to consider (templates.py); all when empty.

    Raises:
        ScheduleError: A number is not one, or a size is negative.
    """

    peak: float | None = None
    capacity: tuple[float, ...] | None = None
    activation_bytes: tuple[float, ...] | None = None
    copies: int = 2
    chunks: int = 2
    split: bool = True
    shapes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (
            ("peak", (self.peak or 0.0,)),
            ("capacity", self.capacity),
            ("activation_bytes", self.activation_bytes),
        ):
            for value in values or ():
                if math.isnan(value) or (value < 0 and name == "activation_bytes"):
                    raise ScheduleError(f"{name} must be a number, activation_bytes not below 0; got {value}")


@dataclass(frozen=True, slots=True)
class Found:
    """What the search found.

    Args:
        shape: Name of its shape (templates.py).
        order: The best order; its placement tells the shape.
        costs: Costs with one entry for every stage of that placement.
        certificate: Its figures, with the bound of its shape.
        any_shape: The least bound of all shapes within the limits: no order of any of them takes less.
        compared: Makespan of the best order of every shape that was tried, by name, in seconds.
    """

    shape: str
    order: Order
    costs: Costs
    certificate: Certificate
    any_shape: Bound
    compared: dict[str, float]
