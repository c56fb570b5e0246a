"""Cuts that the user names: qualified names of the modules that begin a new stage."""

from __future__ import annotations

from collections.abc import Sequence

from fxchimera_passes.atoms import Atoms
from fxchimera_passes.capture.names import require_submodule
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.liveness import Liveness, obstacle
from fxchimera_passes.whole import module_at

__all__ = ["positions_of"]


def positions_of(captured: Captured, live: Liveness, atoms: Atoms, num_stages: int, split_points: Sequence[str]) -> tuple[int, ...]:
    """The atoms at which the modules ``split_points`` begin.

    Raises:
        PartitionError: wrong number of names, an unknown name, a module never called by itself, or one where a cut is illegal.
    """
    if len(split_points) != num_stages - 1:
        raise PartitionError(
            f"split_points names {len(split_points)} modules, num_stages={num_stages} needs {num_stages - 1}: "
            "each name begins a new stage, the first stage begins with the model"
        )
    found: dict[int, str] = {}
    for name in split_points:
        atom = _atom(captured, live, atoms, name)
        if atom in found:
            raise PartitionError(f"split_points {found[atom]!r} and {name!r} begin at the same operation: a stage would be empty")
        found[atom] = name
    return tuple(sorted(found))


def _atom(captured: Captured, live: Liveness, atoms: Atoms, name: str) -> int:
    require_submodule(captured.model, name)
    position = next((i for i in live.carried if _inside(captured, live, i, name)), None)
    if position is None:
        raise PartitionError(f"split point {name!r} {_absence(live, name)}")
    if position == live.carried[0]:
        raise PartitionError(f"split point {name!r} is where the forward begins: stage 0 would be empty")
    place = _before_objects(live, position)
    if place not in live.cuttable:
        raise PartitionError(f"the model cannot be cut where {name!r} begins: {obstacle(live, position)}")
    return atoms.starts.index(place)


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
