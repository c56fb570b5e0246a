"""The name of a model's own call in a graph, for a model that is recorded as one call.

``torch.fx`` calls modules by attribute path and has no path for the root.  So the whole model gets a name that no submodule has; a
skeleton (a stage's module, a clone) holds it under that name, and the user's model is it.
"""

from __future__ import annotations

from torch import nn

__all__ = ["WHOLE", "module_at"]

WHOLE = "<model>"


def module_at(root: nn.Module, target: str) -> nn.Module:
    """Return what a ``call_module`` node with this ``target`` calls in ``root``, a recorded model or a skeleton of one."""
    return root._modules.get(WHOLE) or root if target == WHOLE else root.get_submodule(target)
