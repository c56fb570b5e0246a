"""Which node runs in which stage, what crosses each cut, and who owns each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxchimera_passes.captured import TensorMeta

__all__ = ["BoundaryValue", "Stage", "StagePlan"]


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A tensor that is sent from one stage to the next: the name of its node and its meta data."""

    name: str
    meta: TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a plan.

    ``nodes`` are the names of the nodes it runs, in graph order, rematerialised ones included.  ``inputs`` are positions of the
    model's input tensors that it reads itself.  ``received`` come from the stage before, ``sent`` go to the stage after; a value
    needed further on is passed along by every stage between, so stages form a chain.  ``parameters``/``buffers`` are the
    canonical names that its nodes read; ``owned`` the parameters it owns.  ``cost_seconds`` is forward plus backward.
    """

    index: int
    nodes: tuple[str, ...]
    inputs: tuple[int, ...]
    received: tuple[BoundaryValue, ...]
    sent: tuple[BoundaryValue, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    owned: tuple[str, ...]
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int

    @property
    def cost_seconds(self) -> float:
        """Forward plus backward of one micro-batch, in seconds."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The cut of one captured graph into stages.

    ``owner`` maps every canonical parameter name of the model to the stage that owns it (parameters never used in the forward
    are owned too).  ``bottleneck_seconds`` is the heaviest stage's cost, ``bound_seconds`` a proven lower bound of it over all
    legal cuts, so ``gap`` is how far from optimal the balance can be.
    """

    stages: tuple[Stage, ...]
    owner: Mapping[str, int]
    bottleneck_seconds: float
    bound_seconds: float

    @property
    def gap(self) -> float:
        """Relative distance of the bottleneck from the proven bound (0 is optimal)."""
        return self.bottleneck_seconds / self.bound_seconds - 1.0 if self.bound_seconds else 0.0
