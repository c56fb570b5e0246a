"""Saving a pipeline and loading it again, at another number of ranks too.

Every rank writes what it owns; rank 0 commits when all have.  A load looks at everything before it changes anything: names,
shapes and the digest of every tensor, on all ranks.  Tensors that the user has sharded over several pipelines are written whole, by
the first of these, and each rank reads its share.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.sharded import fill, placed_as
from fxchimera.runtime.weights.jsonvalues import to_json
from fxchimera.runtime.weights.optimizerstate import OptimizerState, is_distributed, optimizer_state, packed_state
from fxchimera.runtime.weights.peers import Peers
from fxchimera.runtime.weights.savedfiles import Stored, damaged, files_of, write_tensors
from fxchimera.runtime.weights.savedindex import Saved, commit, read_index, refuse_foreign, remove_unused
from fxchimera.runtime.weights.state import owned_state
from fxchimera.runtime.weights.weightfiles import Files

__all__ = ["Held", "load", "save"]

_T = TypeVar("_T")
_NO_OPTIMIZER = OptimizerState({}, {}, {})


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has written, and what of its optimizer's state is no tensor, by name."""

    model: Mapping[str, Stored]
    optimizer: Mapping[str, Stored]
    states: Mapping[str, list[str]]
    scalars: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _ToSave:
    """What one rank has to write."""

    state: Mapping[str, torch.Tensor]
    moments: OptimizerState


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds of a pipeline: the model, who owns what, and its own parameters."""

    model: nn.Module
    owner: Mapping[str, int]
    owned: Mapping[str, nn.Parameter]
    world: World


def save(held: Held, folder: Path, optimizer: torch.optim.Optimizer | None, values: Mapping[str, Any]) -> None:
    """Collective: write a checkpoint; until all of it is on the disk the folder's earlier one stays as it is.

    Args:
        held: what this process has.
        folder: made if need be; on a file system that all ranks share.
        optimizer: of this process's parameters.
        values: "step", "seed" and the user's "extra"; rank 0's are kept.

    Raises:
        FxChimeraError: A rank could not write; the folder's earlier checkpoint is whole.
    """
    world, peers = held.world, Peers.of(held.world, held.owned.values())
    token: str = world.spread(uuid.uuid4().hex[:12], "save()")
    if is_distributed(optimizer):
        optimizer.consolidate_state_dict(to=0)
    try:
        gathered = _own(peers, lambda: _to_save(held, folder, optimizer, peers))
        parts = _together(peers, lambda: _written(gathered, folder if peers.first else None, token, world.process))
        _together(peers, lambda: _commit(folder, parts, values) if world.process == 0 and peers.first else None)
    finally:
        if world.process == 0 and peers.first:
            remove_unused(folder)


def _to_save(held: Held, folder: Path, optimizer: torch.optim.Optimizer | None, peers: Peers) -> _ToSave | None:
    """See to the folder, and bring together what this rank has; None where the first pipeline has the same."""
    if held.world.grid.pipeline:
        return None
    if peers.first:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_foreign(folder)
    state = owned_state(held.model, held.owner, held.world)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise FxChimeraError(f"the model's state_dict has a {type(value).__name__} under {name!r}; only tensors can be saved")
    return _ToSave(state, _NO_OPTIMIZER if optimizer is None else optimizer_state(optimizer, held.owned))


def _written(own: _ToSave | None, folder: Path | None, token: str, process: int) -> _Part:
    """Write what this rank has; without a folder only help others to read their shares of it."""
    if own is None:
        return _Part({}, {}, {}, {}, {})
    moments = own.moments
    flat = {f"{name}.{key}": tensor for name, each in moments.tensors.items() for key, tensor in each.items()}
    written: dict[str, Mapping[str, Stored]] = {}
    problems: list[OSError] = []
    for kind, tensors in (("model", own.state), ("optimizer", flat)):
        try:
            written[kind] = write_tensors(folder, kind, token, process, tensors)
        except OSError as error:  # those that share tensors with this rank count on it for those that follow
            problems.append(error)
    if problems:
        raise problems[0]
    return _Part(
        model=written["model"],
        optimizer=written["optimizer"],
        states={name: list(each) for name, each in moments.tensors.items()},
        scalars=moments.scalars,
        options=moments.options,
    )


def _commit(folder: Path, parts: Sequence[_Part], values: Mapping[str, Any]) -> None:
    whole = {field: {name: value for part in parts for name, value in getattr(part, field).items()} for field in _Part.__slots__}
    rest = {field: whole[field] for field in ("states", "scalars", "options")}
    commit(folder, Saved(whole["model"], whole["optimizer"], {**values, "extra": to_json(values["extra"]), **rest}))


def load(held: Held, folder: Path, optimizer: torch.optim.Optimizer | None) -> Mapping[str, Any]:
    """Collective: take over a checkpoint, after all of it was found whole; returns its values.

    Raises:
        FxChimeraError: It is missing or damaged, or does not fit the model or the optimizer; nothing was changed.
    """
    world, peers = held.world, Peers.of(held.world, held.owned.values())
    read = _together(peers, lambda: read_index(folder) if world.process == 0 else None)
    saved = next(found for found in read if found is not None)
    targets = {
        name: tensor
        for name, tensor in held.model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    }

    def look() -> dict[str, Any] | None:
        _compare(held.model, saved, folder)
        _check_tensors(folder, saved, targets)
        return None if optimizer is None else packed_state(optimizer, held.owned, _moments(folder, saved, held.owned))

    packed = _own(peers, look)

    def change() -> None:
        if optimizer is not None and packed is not None:
            optimizer.load_state_dict(packed)
        files = files_of(folder, saved.model)
        for name, target in targets.items():
            fill(target, _read(files, name))

    _together(peers, change)
    return saved.values


def _check_tensors(folder: Path, saved: Saved, targets: Mapping[str, torch.Tensor]) -> None:
    """Read all that this rank needs of the model."""
    files = files_of(folder, saved.model)
    _refuse_damage(folder, damaged(files, saved.model, targets))
    for name, target in targets.items():
        shape = _read(files, name).shape
        if shape != target.shape:
            raise FxChimeraError(
                f"{folder} holds {name!r} with the shape {tuple(shape)}, but the model's is {tuple(target.shape)}; build the model "
                "as it was saved"
            )


def _moments(folder: Path, saved: Saved, owned: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Read the optimizer's state of this rank's parameters into memory."""
    values = saved.values
    if not values["options"]:
        raise FxChimeraError(f"{folder} was saved without an optimizer; load it without optimizer=")
    files = files_of(folder, saved.optimizer)
    names = {name: values["states"].get(name, []) for name in owned}
    _refuse_damage(folder, damaged(files, saved.optimizer, [f"{name}.{key}" for name, keys in names.items() for key in keys]))
    tensors = {
        name: {key: placed_as(owned[name], _read(files, f"{name}.{key}"), f"{key!r} of {name!r}") for key in keys}
        for name, keys in names.items()
    }
    return OptimizerState(tensors, values["scalars"], values["options"])


def _read(files: Files, name: str) -> torch.Tensor:
    value = files.read(name)
    if value is None:
        raise FxChimeraError(f"{files.text} does not hold {name!r}, which the checkpoint's index lists; use another checkpoint")
    return value


def _refuse_damage(folder: Path, broken: Sequence[str]) -> None:
    if broken:
        raise FxChimeraError(
            f"{folder} is damaged: {broken[0]!r} (one of {len(broken)}) is not what was saved; use another checkpoint"
        )


def _compare(model: nn.Module, saved: Saved, folder: Path) -> None:
    expected = set(model.state_dict())
    missing, unexpected = sorted(expected - saved.model.keys()), sorted(saved.model.keys() - expected)
    if missing or unexpected:
        raise FxChimeraError(
            f"{folder} does not fit the model: of the model's {len(expected)} tensors it lacks {len(missing)} ({_some(missing)}), "
            f"and it has {len(unexpected)} that the model lacks ({_some(unexpected)}); build the model as it was saved"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) or "none"


def _own(peers: Peers, call: Callable[[], _T]) -> _T | None:
    """Collective: call on every rank and return what it gave here; when one fails, all raise the first rank's error."""
    value, problem = None, None
    try:
        value = call()
    except Exception as error:  # a full disk, a user's optimizer: whatever it is, all ranks are to know
        problem = str(error) if isinstance(error, FxChimeraError) else f"{type(error).__name__}: {error}"
    if (found := peers.agree(problem)) is not None:
        raise FxChimeraError(found)
    return value


def _together(peers: Peers, call: Callable[[], _T]) -> list[_T]:
    """As :func:`_own`; returns what every rank's call gave."""
    own = _own(peers, call)
    return cast(list[_T], peers.world.gather_objects(own, "save() or load()"))
