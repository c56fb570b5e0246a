"""Split markers that ran while a model was recorded: which modules they want opened, and where in the graph they stand.

A marker inside a module that is one call of the recording marks nothing yet; the modules around it are opened for the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fxchimera_passes.capture.opening import can_open, obstacle
from fxchimera_passes.captured import Marked

__all__ = ["Mark", "reasons", "surviving_marks"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A marker that ran before node number ``position``, at ``line``, inside the ``closed`` modules, outermost first."""

    position: int
    line: str
    closed: tuple[str, ...]


def reasons(around: Mapping[str, str], marks: Sequence[Mark], model: nn.Module, closed: Collection[str]) -> dict[str, str]:
    """Map each module to open for a cut to the reason: those ``around`` a split point, and those that a marker is in."""
    found = {name: f"a split marker is in it, at {mark.line}" for mark in marks for name in mark.closed}
    found = {name: why for name, why in found.items() if name not in closed and can_open(model.get_submodule(name))}
    return found | {name: f"the split point {point!r} lies in it" for name, point in around.items() if name}


def surviving_marks(
    marks: Sequence[Mark], positions: Sequence[int], names: Sequence[str], model: nn.Module, closed: Mapping[str, str]
) -> tuple[Marked, ...]:
    """The first node after each marker, of those left at ``positions`` (ascending); several markers at one place are one.

    Of a marker inside a module that is one call it is told why.
    """
    found: dict[tuple[str, str], str] = {}
    for mark in marks:
        following = next((name for at, name in zip(positions, names, strict=True) if at >= mark.position), "")
        found.setdefault((following, _hidden(mark, model, closed)), mark.line)
    return tuple(Marked(name, line, hidden) for (name, hidden), line in found.items())


def _hidden(mark: Mark, model: nn.Module, closed: Mapping[str, str]) -> str:
    for name in mark.closed:
        module = model.get_submodule(name)
        why = closed.get(name) or obstacle(module) or "its calls are not recorded one by one"
        return f"{name or 'the model'} ({type(module).__name__}), which stays one call: {why}"
    return ""
