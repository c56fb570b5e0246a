"""What a recorded node does to the memory of its arguments.

A value received from another stage must not be a leaf of autograd when its stage writes into it, and a chain of in-place operations
is recomputed in full or not at all.
"""

from __future__ import annotations

from torch import fx, nn

from fxchimera_passes.capture.targets import rebuild
from fxchimera_passes.captured import info
from fxchimera_passes.whole import module_at

__all__ = ["may_alias", "written"]


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The input nodes that ``node`` writes into; with an object made around tensors, these tensors too."""
    names = info(node).mutates
    if not names:
        return ()
    found = [source for source in node.all_input_nodes if source.name in names]
    inside = [tensor for source in found if source.target is rebuild for tensor in source.all_input_nodes]
    return tuple(dict.fromkeys((*found, *inside)))


def may_alias(node: fx.Node, model: nn.Module) -> bool:
    """Whether the value of ``node`` may share memory with one of its inputs; torch's own layers with weights never do."""
    if node.op != "call_module":
        return node.op in ("call_function", "call_method")
    return not _makes_memory(module_at(model, str(node.target)))


def _makes_memory(module: nn.Module) -> bool:
    """Whether the module is one of torch's own layers with weights, or a sequence of modules with one of those."""
    if type(module) is nn.Sequential:
        return any(map(_makes_memory, module))
    return type(module).__module__.startswith("torch.nn.modules") and next(module.parameters(recurse=False), None) is not None
