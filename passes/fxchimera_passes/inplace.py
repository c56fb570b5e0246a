"""Which nodes of a recorded graph may write into their arguments.

Two passes need to know: a value received from another stage must not be a leaf of autograd when its stage writes into it, and a
chain of in-place operations is recomputed in full or not at all.  The answer errs on the side of "may write".
"""

from __future__ import annotations

import operator

from torch import fx, nn

from fxchimera_passes.capture.targets import after

__all__ = ["may_alias", "written"]


def written(node: fx.Node, model: nn.Module) -> tuple[fx.Node, ...]:
    """The input nodes that ``node`` may write into.

    The recording orders readers behind a write with ``after`` nodes, except where the writer returns its argument; for those,
    torch's naming rule decides (one trailing underscore, ``out=``, item assignment, ``inplace=True``).
    """
    ordered = [user.args[0] for user in node.users if user.target is after and user.args[1] is node]
    return tuple(dict.fromkeys((*(old for old in ordered if isinstance(old, fx.Node)), *_by_name(node, model))))


def may_alias(node: fx.Node, model: nn.Module) -> bool:
    """Whether the value of ``node`` may share memory with one of its inputs; torch's own layers with weights never do."""
    if node.op != "call_module":
        return node.op in ("call_function", "call_method")
    module = model.get_submodule(str(node.target))
    own = type(module).__module__.startswith("torch.nn.modules") and next(module.parameters(recurse=False), None) is not None
    return not own


def _by_name(node: fx.Node, model: nn.Module) -> tuple[fx.Node, ...]:
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return (out,)
    if node.op == "call_module":
        return tuple(node.all_input_nodes) if _writing_module(node, model) else ()
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    assigns = node.target is operator.setitem or name in ("__setitem__", "setattr")
    augmented = name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__invert__", "__int__")
    trailing = name.endswith("_") and not name.endswith("__")
    if (assigns or augmented or trailing or node.kwargs.get("inplace") is True) and node.args and isinstance(node.args[0], fx.Node):
        return (node.args[0],)
    # torch.nn.functional passes ``inplace`` by position too: F.relu(x, True), F.dropout(x, p, training, True)
    if node.op == "call_function" and _functional(node) and any(argument is True for argument in node.args[1:]):
        return tuple(n for n in node.args[:1] if isinstance(n, fx.Node))
    return ()


def _functional(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "torch.nn.functional"


def _writing_module(node: fx.Node, model: nn.Module) -> bool:
    # a whole block may start with an in-place activation on its argument; torch's own attribute tells
    module = model.get_submodule(str(node.target))
    return any(getattr(part, "inplace", False) is True for part in module.modules())
