"""A stage's graph as a compiler can take it: one piece of tensor code.

What a recording adds to the user's operations stands in the compiler's way where it is Python: the keys of random operations (a
dispatch mode) are taken out, and a stage that checks assumed answers, or seeds Python's generators, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxchimera_passes.assumed import Check
from fxchimera_passes.keyed import HOST_ORDINAL
from fxchimera_passes.scope import Scope, call_in_scope
from fxchimera_passes.split import StageGraph

__all__ = ["Compilable", "compilable"]


@dataclass(frozen=True, slots=True)
class Compilable:
    """The graph without keys, and whether it draws random numbers."""

    graph: StageGraph
    random: bool


def compilable(graph: StageGraph) -> Compilable | None:
    """Return what can be compiled of a stage, None where nothing can."""
    scopes = {name: value for name, value in graph.constants.items() if isinstance(value, Scope)}
    keys = [key for scope in scopes.values() for key in scope.random]
    if any(key.ordinal == HOST_ORDINAL for key in keys) or any(isinstance(node.target, Check) for node in graph.graph.nodes):
        return None
    if any(isinstance(value, Check) for value in graph.constants.values()):
        return None
    return Compilable(replace(graph, graph=_traceable(graph.graph, scopes)), bool(keys))


def _traceable(graph: fx.Graph, scopes: dict[str, Scope]) -> fx.Graph:
    """Copy a graph, its calls in surroundings of their own written so that a compiler can follow them, without keys."""
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    for node in list(made.nodes):
        if node.target is not call_in_scope:
            continue
        setting, function, *args = node.args
        scope = scopes[str(setting.target)]
        with made.inserting_before(node):
            plain = scope.grad is None and scope.autocast is None
            target, given = (_call, (function, *args)) if plain else (_call_in, (function, scope.grad, scope.autocast, *args))
            direct = made.create_node("call_function", target, given, node.kwargs)
        direct.meta = dict(node.meta)
        node.replace_all_uses_with(direct)
        made.erase_node(node)
        if not setting.users:
            made.erase_node(setting)
    return made


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _call_in(
    function: Callable[..., Any], grad: bool | None, autocast: tuple[str, torch.dtype, bool] | None, *args: Any, **kwargs: Any
) -> Any:
    """Call under a grad mode, or in an autocast region, or both."""
    if grad is not None:
        with torch.set_grad_enabled(grad):
            return function(*args, **kwargs) if autocast is None else _call_in(function, None, autocast, *args, **kwargs)
    assert autocast is not None
    device, dtype, enabled = autocast
    with torch.autocast(device, dtype=dtype, enabled=enabled):
        return function(*args, **kwargs)
