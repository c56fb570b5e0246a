"""A stage's graph as a compiler can take it: one piece of tensor code.

What a recording adds to the user's operations stands in the compiler's way where it is Python: the keys of random operations (a
dispatch mode) are taken out, and a stage that checks assumed answers, or seeds Python's generators, stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    bare = {name: replace(scope, random=()) for name, scope in scopes.items()}
    return Compilable(replace(graph, graph=_without_scopes(graph.graph, bare), constants={**graph.constants, **bare}), bool(keys))


def _without_scopes(graph: fx.Graph, scopes: dict[str, Scope]) -> fx.Graph:
    """Copy a graph, and call directly what needs no surroundings of its own."""
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    for node in list(made.nodes):
        if node.target is not call_in_scope or scopes[str(node.args[0].target)] != Scope():
            continue
        setting, function, *args = node.args
        with made.inserting_before(node):
            direct = made.create_node("call_function", _call, (function, *args), node.kwargs)
        direct.meta = dict(node.meta)
        node.replace_all_uses_with(direct)
        made.erase_node(node)
        if not setting.users:
            made.erase_node(setting)
    return made


def _call(function: object, *args: object, **kwargs: object) -> object:
    return function(*args, **kwargs)  # type: ignore[operator]
