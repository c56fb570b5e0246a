"""Whether splitting the backward of a stage can put anything off, told from its recording before it runs.

A weight's gradient waits for W where an operator that the runtime sees reads the weight; inside an LSTM, a compiled or scripted
module, a custom Function or a checkpointed region nothing waits: I is the whole backward there, and W takes no time.  A closed
module of the user's own is taken to use its matrices in the usual operators.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn

from fxchimera_passes._torch import compiled
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.whole import module_at

__all__ = ["can_wait", "splittable"]

_OPERATORS = frozenset(
    {
        "linear", "bilinear", "embedding", "embedding_bag", "einsum", "tensordot", "multi_head_attention_forward",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
        "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "grouped_mm", "_grouped_mm",
    }
)  # fmt: skip
_WHOLE = (nn.RNNBase, nn.RNNCellBase, nn.LayerNorm, nn.RMSNorm)


def splittable(captured: Captured, nodes: Iterable[str]) -> bool:
    """Return whether the backward of a stage of these nodes has a part that can wait for W.

    Where not, I takes what the whole backward takes, and W nothing.  The runtime finds out by itself; this is for plans.
    """
    wanted = set(nodes)
    return any(can_wait(captured, node) for node in captured.graph.nodes if node.name in wanted)


def can_wait(captured: Captured, node: fx.Node) -> bool:
    """Return whether the backward of one call has such a part."""
    if not info(node).grad_enabled:
        return False
    if node.op == "call_module":
        target = str(node.target)
        return _module(module_at(captured.model, target))
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name not in _OPERATORS and not getattr(node.target, "splittable", False):
        return False
    return not node.kwargs.get("sparse") and any(_weight(captured, argument) for argument in node.all_input_nodes)


def _weight(captured: Captured, node: fx.Node) -> bool:
    """Whether a value is a trainable matrix, or made of parameters alone."""
    if node.op != "get_attr":
        return info(node).depends == {"parameter"} and node.op != "call_module"
    owner, _, name = str(node.target).rpartition(".")
    value = None if str(node.target) in captured.constants else getattr(captured.model.get_submodule(owner), name, None)
    return isinstance(value, nn.Parameter) and value.requires_grad and value.dim() > 1


def _module(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs an operator that reads a trainable matrix, as far as its class tells."""
    if compiled(module) or isinstance(module, torch.jit.ScriptModule) or getattr(module, "gradient_checkpointing", False):
        return False
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or module.max_norm is not None):
        return False
    own = not isinstance(module, _WHOLE) and any(p.requires_grad and p.dim() > 1 for p in module.parameters(recurse=False))
    return own or any(map(_module, module.children()))
