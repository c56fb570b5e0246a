"""What part of the model a stage runs, in the model's own names."""

from __future__ import annotations

from torch import fx

from fxchimera_passes.captured import Captured, info
from fxchimera_passes.plan import StagePlan

__all__ = ["spans_of"]


def spans_of(captured: Captured, cut: StagePlan) -> tuple[str, ...]:
    """For each stage its first and last operation that belongs to it alone: ``transformer.h.0 .. transformer.h.2.mlp``."""
    again = _repeated(cut)
    labels = {node.name: _label(node) for node in captured.graph.nodes if node.op.startswith("call")}
    found = []
    for stage in cut.stages:
        own = [labels[name] for name in stage.nodes if name not in again and name in labels] or [labels[n] for n in stage.nodes]
        first, last = (own[0], own[-1]) if own else ("nothing", "nothing")
        found.append(first if first == last else f"{first} .. {last}")
    return tuple(found)


def _repeated(cut: StagePlan) -> set[str]:
    """The nodes that several stages run, because they are computed again rather than sent."""
    once, twice = set[str](), set[str]()
    for stage in cut.stages:
        twice |= once & set(stage.nodes)
        once |= set(stage.nodes)
    return twice


def _label(node: fx.Node) -> str:
    """A module by its name, a function by the module that calls it."""
    if node.op == "call_module":
        return str(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
    owner = info(node).module
    return f"{owner}:{name}" if owner else str(name)
