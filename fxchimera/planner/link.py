"""What a plan takes for granted about the machine beyond the seconds of its operators: messages, and split backwards.

Without a measurement these are constants, so that two runs make the same cut.  They go with where the seconds of operators come
from:

    estimated              the links of the machine of ``fxchimera_passes.analytic``; no latency, as its operators have none.  The
                           same for threads and processes, so both get one plan
    measured, threads      what ``pipe.profile()`` found on 2 cores: tensors are handed over, not copied
    measured, processes    the same over gloo on one host; with an accelerator, a network of 400 Gb/s for each
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxchimera.errors import FxChimeraError
from fxchimera_passes.analytic import LINK_BYTES_PER_SECOND

__all__ = ["Link", "Measures"]


@dataclass(frozen=True, slots=True)
class Link:
    """How long a message between two ranks takes: ``latency`` seconds, and its bytes at ``bytes_per_second``."""

    latency: float = 0.0
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not (0.0 <= self.latency < math.inf and self.bytes_per_second > 0.0):
            raise FxChimeraError(
                f"a link has a latency of at least 0 seconds and a bandwidth above 0 bytes a second, got {self.latency} and "
                f"{self.bytes_per_second}"
            )

    def seconds(self, size: float) -> float:
        """Seconds from the start of a send of ``size`` bytes until they are there."""
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What holds for a recording on a machine, however it is cut.

    Args:
        link: Messages between ranks.
        split_price: What the two halves of a backward take beyond the whole, as a share of it (3 to 5 % of a transformer layer on a
            CPU: benchmarks/split.py).
        input_share: The input gradient's share of the two halves, where nothing else is known of a stage.
        split_forward: What a forward takes beyond its seconds where its backward is split, as a share of them.
    """

    link: Link = Link()
    split_price: float = 0.04
    input_share: float = 0.5
    split_forward: float = 0.0

    @classmethod
    def usual(cls, cost: str, device: str, *, threads: bool) -> Measures:
        """What is taken for granted where nothing was measured.

        Args:
            cost: Where the seconds of operators are from, "analytic" or "measured".
            device: The kind of device that the ranks run on.
            threads: The ranks are threads of one process.
        """
        return cls(link=_ESTIMATED if cost == "analytic" else _THREADS if threads else _LINKS.get(device, _NETWORK))

    def __post_init__(self) -> None:
        if not (self.split_price >= 0.0 and 0.0 <= self.input_share <= 1.0 and self.split_forward >= 0.0):
            raise FxChimeraError(
                "the price of a split is at least 0 and the input gradient's share between 0 and 1, got "
                f"split_price={self.split_price}, input_share={self.input_share}, split_forward={self.split_forward}"
            )

    def halves(self, forward: float, backward: float, deferrable: float | None = None) -> tuple[float, float]:
        """Seconds of the input and of the weight gradient of a stage; what splitting adds to its forward is charged to them.

        ``deferrable`` are the seconds of the backward that are for weights whose gradients can be put off; None: not known, so
        ``input_share`` counts.  Where it is 0, a split backward is a whole one and nothing.
        """
        if deferrable == 0.0 or backward == 0.0:
            return backward, 0.0
        both = (1.0 + self.split_price) * backward + self.split_forward * forward
        first = self.input_share if deferrable is None else max(0.0, 1.0 - deferrable / backward)
        return first * both, (1.0 - first) * both


_ESTIMATED = Link(0.0, LINK_BYTES_PER_SECOND)
_THREADS = Link(1.3e-5, 3.6e10)
_NETWORK = Link(2e-5, 5e10)
_LINKS = {"cpu": Link(2e-4, 1.5e9)}  # between processes
