"""What a recorded node does to the memory of its arguments.

A value received from another stage must not be a leaf of autograd when its stage writes into it, and a chain of in-place operations
is recomputed in full or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx, nn

from fxchimera_passes.capture.targets import rebuild
from fxchimera_passes.captured import info
from fxchimera_passes.whole import module_at

__all__ = ["overwritten", "written"]


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The input nodes that ``node`` writes into; with an object made around tensors, these tensors too."""
    names = info(node).mutates
    if not names:
        return ()
    found = [source for source in node.all_input_nodes if source.name in names]
    inside = [tensor for source in found if source.target is rebuild for tensor in source.all_input_nodes]
    return tuple(dict.fromkeys((*found, *inside)))


def overwritten(arrived: Collection[fx.Node], run: Sequence[fx.Node], model: nn.Module) -> list[fx.Node]:
    """Those of the ``arrived`` values of a stage whose memory the nodes that it runs may write, in graph order ``run``.

    A value from another stage lies in the memory that the recording saw it in.  The user's batch, and a value that overlaps itself
    or has gaps, which arrives in another layout, may share memory with what seemed a copy of it, so for those a chain of aliases
    as long as may be is assumed.
    """
    targets = {target for node in run for target in written(node)}
    memory = {info(target).memory for target in targets}
    touched = set(targets)
    for node in reversed(run):
        if node in touched and _may_alias(node, model):
            touched.update(node.all_input_nodes)
    return [node for node in arrived if (info(node).memory in memory if _stays_put(node) else node in touched)]


def _stays_put(node: fx.Node) -> bool:
    """Whether the value of ``node`` lies in a numbered piece of memory, each of its numbers in a place of its own, without gaps."""
    value, size = info(node).value, 1
    if value is None or info(node).memory < 0:
        return False
    for stride, length in sorted(zip(value.stride, value.shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _may_alias(node: fx.Node, model: nn.Module) -> bool:
    """Whether the value of ``node`` may share memory with one of its inputs; torch's own layers with weights never do."""
    if node.op != "call_module":
        return node.op in ("call_function", "call_method")
    return not _makes_memory(module_at(model, str(node.target)))


def _makes_memory(module: nn.Module) -> bool:
    """Whether the module is one of torch's own layers with weights, or a sequence of modules with one of those."""
    if type(module) is nn.Sequential:
        return any(map(_makes_memory, module))
    return type(module).__module__.startswith("torch.nn.modules") and next(module.parameters(recurse=False), None) is not None
