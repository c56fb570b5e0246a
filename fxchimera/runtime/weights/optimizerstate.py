"""An optimizer's state by parameter name, so that it can be saved by one number of ranks and loaded by another.

torch numbers the parameters of an optimizer, and every rank has an optimizer of its own, so the numbers say nothing.  What
belongs to a parameter (its moments, and the options of its group) is filed under its name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from fxchimera.errors import FxChimeraError

__all__ = ["OptimizerState", "is_distributed", "optimizer_state", "packed_state"]

_NUMBERED = ("params", "param_names")  # of a group: what is said by number


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """By parameter: ``tensors`` and ``scalars`` by their names in the state, and the ``options`` of its group."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    scalars: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]


def optimizer_state(optimizer: torch.optim.Optimizer, owned: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Take an optimizer's state apart by parameter.

    Raises:
        FxChimeraError: It has a parameter that is not the pipeline's, or a state that is neither tensor nor number or text.
    """
    names = _names(optimizer, owned)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    packed = optimizer.state_dict()
    for group in packed["param_groups"]:
        own = {key: _plain(value, f"option {key!r}") for key, value in group.items() if key not in _NUMBERED}
        options |= {names[number]: own for number in group["params"]}
    for number, state in packed["state"].items():
        name = names[number]
        tensors[name] = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in state.items() if key not in tensors[name]}
        scalars[name] = {key: _plain(value, f"state {key!r} of {name!r}") for key, value in others.items()}
    return OptimizerState(tensors, scalars, options)


def packed_state(optimizer: torch.optim.Optimizer, owned: Mapping[str, nn.Parameter], saved: OptimizerState) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes, for the parameters that this rank owns now.

    Raises:
        FxChimeraError: A parameter was not saved with an optimizer, or a group would need two values of one option.
    """
    names, groups = _names(optimizer, owned), _groups(optimizer)
    state = {number: {**saved.tensors.get(name, {}), **saved.scalars.get(name, {})} for number, name in names.items()}
    for group in groups:
        own = [names[number] for number in group["params"]]
        lacking = next((name for name in own if name not in saved.options), None)
        if lacking is not None:
            raise FxChimeraError(
                f"the checkpoint has no optimizer state of parameter {lacking!r}, which the optimizer has; it was saved with an "
                f"optimizer of {len(saved.options)} parameters. Load into one of the same parameters, or leave optimizer= out"
            )
        for key in saved.options[own[0]] if own else ():
            group[key] = _like(group.get(key), _one_value(key, {name: saved.options[name].get(key) for name in own}))
    return {"state": {number: own for number, own in state.items() if own}, "param_groups": groups}


def is_distributed(optimizer: torch.optim.Optimizer | None) -> TypeGuard[_Distributed]:
    """Whether each pipeline keeps a part of the state only, as with torch's ``ZeroRedundancyOptimizer``, whose import is slow."""
    return hasattr(optimizer, "consolidate_state_dict")


class _Distributed(Protocol):
    param_groups: list[dict[str, Any]]

    def consolidate_state_dict(self, to: int) -> None: ...


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups as in ``state_dict()``, which an optimizer with its state on several pipelines has for those together only."""
    if not is_distributed(optimizer):
        found: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        return found
    numbers = itertools.count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


def _like(present: Any, value: Any) -> Any:
    """Undo what JSON does to tensors and tuples."""
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, value)
    return tuple(value) if isinstance(value, list) else value


def _one_value(key: str, values: Mapping[str, Any]) -> Any:
    first = next(iter(values))
    for name, value in values.items():
        if value != values[first]:
            raise FxChimeraError(
                f"the optimizer has {first!r} and {name!r} in one group, but they were saved with {key} {values[first]!r} and "
                f"{value!r}; make the groups as they were"
            )
    return values[first]


def _names(optimizer: torch.optim.Optimizer, owned: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """The parameter name of every number that the optimizer's ``state_dict`` uses."""
    known = {id(parameter): name for name, parameter in owned.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = next((parameter for parameter in parameters if id(parameter) not in known), None)
    if foreign is not None:
        raise FxChimeraError(
            f"the optimizer has a parameter of shape {tuple(foreign.shape)} that is not one of pipe.parameters(); save and load "
            "take an optimizer of the pipeline's own parameters"
        )
    return {number: known[id(parameter)] for number, parameter in enumerate(parameters)}


def _plain(value: Any, what: str) -> Any:
    """Return ``value`` as JSON gives it back."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()  # a learning rate may be one
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise FxChimeraError(
            f"the optimizer's {what} is {value!r}, which is neither tensor, number, text nor a list of these; make it one of them, "
            "or leave optimizer= out"
        ) from error
