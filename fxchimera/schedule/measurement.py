"""What a measurement of a pipeline found: how long every stage computes, and how long messages between its ranks take.

Pure figures: the runtime takes them, the planner makes costs of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LinkTimes", "Measurement", "StageTimes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that one micro-batch takes on one stage, medians of the rounds.

    Attributes:
        forward: F, of a micro-batch whose backward will be whole; on the last stage with the loss.
        split_forward: F, of a micro-batch whose backward will be split.
        backward: B.
        input_grad: I.
        weight_grad: W.
    """

    forward: float
    split_forward: float
    backward: float
    input_grad: float
    weight_grad: float

    @property
    def halves(self) -> tuple[float, float]:
        """I and W, each with its share of what splitting adds to the forward."""
        both = self.input_grad + self.weight_grad
        factor = 1.0 + max(0.0, self.split_forward - self.forward) / both if both else 1.0
        return factor * self.input_grad, factor * self.weight_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Seconds of a small and of a large message between two ranks, one way, medians of the rounds.

    Attributes:
        ranks: The two, in the order of their stages.
        small: Seconds of a message of a few bytes.
        large: Seconds of a message of ``large_bytes`` bytes.
        large_bytes: The size of the large one.
    """

    ranks: tuple[int, int]
    small: float
    large: float
    large_bytes: int

    @property
    def bytes_per_second(self) -> float:
        """What the large message's size took beyond the small one; infinite where that cannot be told from nothing."""
        return self.large_bytes / (self.large - self.small) if self.large > self.small else math.inf


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of all stages, in order, and of all pairs of neighbouring ranks."""

    stages: tuple[StageTimes, ...]
    links: tuple[LinkTimes, ...]

    @property
    def latency(self) -> float:
        """Seconds of a small message on the slowest link; 0 where there is none."""
        return max((link.small for link in self.links), default=0.0)

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of the slowest link."""
        return min((link.bytes_per_second for link in self.links), default=math.inf)
