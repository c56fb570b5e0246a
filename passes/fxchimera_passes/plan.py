"""Which node runs in which stage, what crosses each cut, and who owns each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxchimera_passes.captured import TensorMeta

__all__ = ["FULL", "MODES", "NONE", "SELECTIVE", "BoundaryValue", "Load", "Stage", "StagePlan"]

NONE, SELECTIVE, FULL = MODES = ("none", "selective", "full")
"""How much of a stage's forward is run again in its backward, instead of being kept."""


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A tensor that is sent from one stage to the next: the name of its node and its meta data."""

    name: str
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class Load:
    """What a stage costs for one micro-batch: seconds forward and backward, and the bytes that it sends on in the forward.

    ``recompute_seconds`` of the backward are for running a part of the forward again, ``deferrable_seconds`` for weights whose
    gradients can be put off (None: not known).
    """

    forward_seconds: float
    backward_seconds: float
    sent_bytes: int
    recompute_seconds: float = 0.0
    deferrable_seconds: float | None = None

    @property
    def cost_seconds(self) -> float:
        """Forward plus backward, in seconds."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a plan.

    ``nodes`` are the names of the nodes it runs, in graph order, rematerialised ones included.  ``inputs`` are positions of the
    model's input tensors that it reads itself.  ``received`` come from the stage before, ``sent`` go to the stage after; a value
    needed further on is passed along by every stage between, so stages form a chain.  ``parameters``/``buffers`` are the
    canonical names that its nodes read; ``owned`` the parameters it owns.  ``cost_seconds`` is forward plus backward.
    ``activation_bytes`` is what one micro-batch holds from its forward to its backward: what autograd saves, what was received, and
    what is sent or returned.

    ``recompute`` tells which of ``MODES`` the stage runs in; both figures above are with it.  Its backward takes
    ``recompute_seconds`` of ``backward_seconds`` for that, and needs ``recompute_bytes`` on top while it runs.  ``kept_whole`` says
    of nodes that cannot be run again why.  ``deferrable_seconds`` of the backward are for weights whose gradients can be put off
    (None: not known).
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
    activation_bytes: int = 0
    recompute: str = NONE
    recompute_seconds: float = 0.0
    recompute_bytes: int = 0
    kept_whole: tuple[str, ...] = field(default=(), repr=False)
    deferrable_seconds: float | None = None

    @property
    def cost_seconds(self) -> float:
        """Forward plus backward of one micro-batch, in seconds."""
        return self.forward_seconds + self.backward_seconds

    @property
    def sent_bytes(self) -> int:
        """What one micro-batch's forward sends to the next stage, in bytes."""
        return sum(value.meta.bytes for value in self.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The cut of one captured graph into stages.

    ``owner`` maps every canonical parameter name of the model to the stage that owns it (parameters never used in the forward
    are owned too).  ``bottleneck_seconds`` is the heaviest stage's cost, ``bound_seconds`` a proven lower bound of it over all
    legal cuts, so ``gap`` is how far from optimal the balance can be.  ``notes`` are sentences for a user whose model was cut more
    coarsely than asked for; they hold paths, which differ between hosts, so they are not part of the text that ranks compare.
    """

    stages: tuple[Stage, ...]
    owner: Mapping[str, int]
    bottleneck_seconds: float
    bound_seconds: float
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def gap(self) -> float:
        """Relative distance of the bottleneck from the proven bound (0 is optimal)."""
        return self.bottleneck_seconds / self.bound_seconds - 1.0 if self.bound_seconds else 0.0
