"""Before a call: is the user's model still the one that was wrapped?

The ranks hold on to the model's parameter and module objects, and to the buffers that stages read outside their closed modules.
One that was replaced meanwhile would train silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fxchimera.errors import FxChimeraError

__all__ = ["Inspection"]


class Inspection:
    """Remembers where this process's parameters and modules, and the given buffers, hang in the model."""

    def __init__(self, model: nn.Module, buffers: Iterable[str]) -> None:
        read = set(buffers)
        self._places: list[tuple[str, dict[str, Any], str, object]] = []
        self._tables: list[tuple[str, dict[str, Any], int]] = []
        for path, module in model.named_modules():
            for kind, table in (("parameter", module._parameters), ("module", module._modules), ("buffer", module._buffers)):
                names = {key: f"{path}.{key}" if path else key for key in table}
                watched = {key: name for key, name in names.items() if kind != "buffer" or name in read}
                self._places += [(f"{kind} {watched[key]!r}", table, key, table[key]) for key in watched]
            self._tables += [(path, module._parameters, len(module._parameters)), (path, module._modules, len(module._modules))]

    def check(self) -> None:
        """Compare the model with what was wrapped.

        Raises:
            FxChimeraError: A parameter, module or buffer is another object, is gone, or is new.
        """
        for name, table, key, value in self._places:
            if table.get(key) is not value:
                raise FxChimeraError(
                    f"{name} is another object than when the model was wrapped; write the new values into the old one "
                    "(load_state_dict without assign=True, or .data.copy_(...)), or wrap the model again"
                )
        for path, table, count in self._tables:
            if len(table) != count:
                raise FxChimeraError(
                    f"module {path!r} has {len(table)} parameters or submodules of its own, but had {count} when the model was "
                    f"wrapped ({', '.join(table)}); wrap the model again"
                )
