"""Cuts that the user names: modules that begin a new stage, or end one, and markers in the forward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxchimera_passes.atoms import Atoms
from fxchimera_passes.capture.names import require_submodule
from fxchimera_passes.captured import Captured, Marked, info
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.liveness import Liveness, obstacle
from fxchimera_passes.whole import module_at

__all__ = ["After", "Place", "modules_of", "positions_of"]


@dataclass(frozen=True, slots=True)
class After:
    """The place where the first call of the module ``name`` ends."""

    name: str


Place: TypeAlias = str | After | Marked
"""A cut: the qualified name of the module that begins a new stage, the module that ends one, or a marker."""


def modules_of(places: Sequence[Place]) -> list[str]:
    """The modules that must be called by themselves in a recording that is to be cut at ``places``."""
    return [place if isinstance(place, str) else place.name for place in places if not isinstance(place, Marked)]


def positions_of(captured: Captured, live: Liveness, atoms: Atoms, num_stages: int, places: Sequence[Place]) -> tuple[int, ...]:
    """The atoms that begin at ``places``.

    Raises:
        PartitionError: wrong number of places, an unknown name, a module never called by itself, or one where a cut is illegal.
    """
    if len(places) != num_stages - 1:
        raise PartitionError(_miscounted(places, num_stages))
    found: dict[int, Place] = {}
    for place in places:
        atom = _atom(captured, live, atoms, place)
        if atom in found:
            both = f"{_named(found[atom])} and {_named(place)}"
            raise PartitionError(f"split_points {both} begin at the same operation: a stage would be empty")
        found[atom] = place
    return tuple(sorted(found))


def _miscounted(places: Sequence[Place], num_stages: int) -> str:
    marked = [place for place in places if isinstance(place, Marked)]
    if marked:
        lines = ", ".join(place.line for place in marked)
        return (
            f"the forward has {len(marked)} split markers ({lines}), {num_stages} stages need {num_stages - 1}: each ends a stage. "
            f"Pass split_points= to cut elsewhere, or another num_stages"
        )
    return (
        f"split_points names {len(places)} modules, num_stages={num_stages} needs {num_stages - 1}: "
        "each name begins a new stage, the first stage begins with the model"
    )


def _named(place: Place) -> str:
    if isinstance(place, Marked):
        return f"the marker at {place.line}"
    return repr(place) if isinstance(place, str) else f"the end of {place.name!r}"


def _atom(captured: Captured, live: Liveness, atoms: Atoms, place: Place) -> int:
    """The atom that begins at ``place``."""
    if isinstance(place, Marked) and place.hidden:
        raise PartitionError(
            f"the split marker at {place.line} lies inside {place.hidden}. Mark a place outside that module, or pass split_points="
        )
    position = _position(captured, live, place)
    if position is None:
        raise PartitionError(f"nothing that runs in one stage alone comes after {_named(place)}: the last stage would be empty")
    if position == live.carried[0]:
        where = f"split point {place!r}" if isinstance(place, str) else _named(place)
        raise PartitionError(f"{where} is where the forward begins: stage 0 would be empty")
    legal = _before_objects(live, position)
    if legal not in live.cuttable:
        where = f"where {place!r} begins" if isinstance(place, str) else f"at {_named(place)}"
        raise PartitionError(f"the model cannot be cut {where}: {obstacle(live, position)}")
    return atoms.starts.index(legal)


def _position(captured: Captured, live: Liveness, place: Place) -> int | None:
    """The first node of the stage that begins at ``place``, of those that one stage runs; None when there is none."""
    if isinstance(place, Marked):
        start = next((i for i, node in enumerate(live.nodes) if node.name == place.node), len(live.nodes))
        return next((i for i in live.carried if i >= start), None)
    name = place if isinstance(place, str) else place.name
    require_submodule(captured.model, name)
    inside = [_inside(captured, live, i, name) for i in live.carried]
    if True not in inside:
        raise PartitionError(f"split point {name!r} {_absence(live, name)}")
    first = inside.index(True)
    if isinstance(place, str):
        return live.carried[first]
    after = (i for i, within in zip(live.carried[first:], inside[first:], strict=True) if not within)
    return next((i for i in after if not _takes_apart(live, i)), None)


def _takes_apart(live: Liveness, position: int) -> bool:
    """Whether the node only reads a tensor out of what a call returned, with which it stays."""
    return live.nodes[position].target in (operator.getitem, getattr) and any(lo < position <= hi for lo, hi in live.pinned)


def _before_objects(live: Liveness, position: int) -> int:
    """Step back over what only makes an object for the module at ``position``: objects do not cross a cut, their tensors do."""
    while position not in live.cuttable and position > 0 and info(live.nodes[position - 1]).value is None:
        position -= 1
    return position


def _inside(captured: Captured, live: Liveness, position: int, name: str) -> bool:
    node = live.nodes[position]
    module = captured.model.get_submodule(name)
    if node.op == "call_module" and module_at(captured.model, str(node.target)) is module:
        return True
    paths = (info(node).module, str(node.target) if node.op == "call_module" else "")
    return any(path == name or path.startswith(f"{name}.") for path in paths)


def _absence(live: Liveness, name: str) -> str:
    for i in live.carried:
        node = live.nodes[i]
        if node.op == "call_module" and name.startswith(f"{node.target}."):
            return f"lies inside {node.target!r}, which was recorded as one call: capture the model with opened=[{name!r}]"
    return "was not called in the recorded forward; a container such as a ModuleList is not called, name its first entry"
