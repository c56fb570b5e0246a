"""The model's own names: of modules, parameters and buffers, looked up by object identity.

A shared object has several names; the canonical one is the first, as ``named_modules``/``named_parameters`` give it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import Tensor, nn

from fxchimera_passes._torch import storage_key, tensor_tables
from fxchimera_passes.errors import PartitionError

__all__ = ["Names", "parameter_aliases", "require_submodule"]


def require_submodule(model: nn.Module, point: str) -> None:
    """Check that the split point ``point`` is the name of a submodule.

    Raises:
        PartitionError: it is not; the message names those that are nearly called so.
    """
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if point not in known:
        near = difflib.get_close_matches(point, known, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise PartitionError(f"split point {point!r} is not a module of the model{hint}")


def parameter_aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map every canonical parameter name to all names of that parameter."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in aliases.values()}


class Names:
    """Canonical names by identity, for the tensors that ``model`` holds now."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        self.parameters: dict[int, str] = {id(tensor): name for name, tensor in model.named_parameters()}
        self.buffers: dict[int, str] = {}
        self.buffer_storages: dict[int | None, str] = {}
        self._kept: list[Tensor] = []
        for name, tensor in model.named_buffers():
            self.add_buffer(name, tensor)

    def add_buffer(self, name: str, tensor: Tensor) -> None:
        """Let ``tensor`` be known as the buffer ``name``."""
        self._kept.append(tensor)
        self.buffers[id(tensor)] = name
        self.buffer_storages[storage_key(tensor)] = name

    def tensor(self, tensor: Tensor) -> str | None:
        """Return the canonical name of a parameter or buffer, None for any other tensor."""
        return self.parameters.get(id(tensor)) or self.buffers.get(id(tensor))

    def inside(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the canonical names of the parameters and of the buffers in the whole subtree of ``module``."""
        parameters = tuple(self.parameters[id(t)] for t in module.parameters() if id(t) in self.parameters)
        return parameters, tuple(self.buffers[id(t)] for t in module.buffers() if id(t) in self.buffers)

    def slots(self, modules: Iterable[nn.Module]) -> dict[str, Tensor]:
        """Map "module.buffer" to the tensor that sits there now, for the own buffers of ``modules``."""
        found: dict[str, Tensor] = {}
        for module in modules:
            prefix = self.modules.get(id(module), "")
            for name, tensor in tensor_tables(module)[1].items():
                if tensor is not None:
                    found[f"{prefix}.{name}" if prefix else name] = tensor
        return found
