"""Where a run is: an action on a rank, put into words only when an error needs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxchimera.runtime.failures.place import label
from fxchimera.schedule.action import Action
from fxchimera.schedule.placement import Placement

__all__ = ["Position"]


@dataclass(frozen=True)  # not slotted: the label is kept, as it is wanted in every step
class Position:
    """An action of one rank, None before the first; its text names rank, stage, direction, micro-batch and action."""

    rank: int
    action: Action | None
    placement: Placement

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.on_rank()}"

    @cached_property
    def label(self) -> bytes:
        """What a :class:`Place` takes."""
        return label(self.on_rank())

    def on_rank(self) -> str:
        """Return the text without the rank."""
        action, place = self.action, self.placement
        if action is None:
            return "before the first action"
        if action.microbatch is None:
            return f"stage {action.stage}, action {action}"
        pipe = place.pipe_name(place.pipe_of[action.microbatch])
        return f"stage {action.stage} ({pipe}), micro-batch {action.microbatch}, action {action}"
