"""How a computation is named in a picture: kind and micro-batch, capitals for the down pipes, small letters for the up pipes."""

from __future__ import annotations

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.timeline import Timeline

__all__ = ["comparable", "goes_up", "label", "ratio_text", "seconds", "summary"]

_FAR_APART = 10.0


def goes_up(action: Action, placement: Placement) -> bool:
    """Whether an action belongs to a micro-batch of an up pipe."""
    return action.microbatch is not None and placement.pipe_of[action.microbatch] % 2 == 1


def label(action: Action, placement: Placement) -> str:
    """``F3`` is the forward of micro-batch 3 on its way down, ``b5`` the backward of micro-batch 5, which goes up."""
    text = f"{action.kind.value}{action.microbatch}"
    return text.lower() if goes_up(action, placement) else text


def seconds(value: float) -> str:
    """A duration in the unit that reads best, three digits: ``16 s``, ``4.25 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}" if value * factor < 1000 else f"{value * factor:.0f} {unit}"
    raise AssertionError("unreachable")


def summary(timeline: Timeline) -> str:
    """Name, makespan and bubble in one line."""
    return f"{timeline.name}: makespan {seconds(timeline.makespan)}, bubble {timeline.bubble:.1%} (with a barrier)"


def comparable(predicted: Timeline, measured: Timeline) -> bool:
    """Whether one scale shows both; seconds counted at an accelerator's rates are far from those of a CPU, for instance."""
    short, long = sorted(timeline.makespan for timeline in (predicted, measured))
    return long <= _FAR_APART * short or not short


def ratio_text(predicted: Timeline, measured: Timeline) -> str:
    """How a prediction compares with what was measured, in one line.

    Raises:
        ScheduleError: They have another number of ranks.
    """
    here, there = predicted.placement.num_ranks, measured.placement.num_ranks
    if here != there:
        raise ScheduleError(
            f"a prediction for {here} ranks cannot be laid over a measurement of {there}; give two timelines of one pipeline"
        )
    ratio = predicted.makespan / measured.makespan if measured.makespan else None
    if comparable(predicted, measured):
        return f"predicted / measured makespan: {'-' if ratio is None else f'{ratio:.3f}'}"
    return f"predicted / measured makespan: {ratio:.2g}, so each is drawn to a scale of its own; pipe.profile() measures the costs"
