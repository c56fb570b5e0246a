"""The buffers that one replica uses: the user's own, or copies of them.

down replica   the user's own, or a copy where another device has the original because an earlier stage uses it too
up replica     copies, which the exchange refreshes
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fxchimera.errors import FxChimeraError

__all__ = ["StageBuffers", "place_of"]


class StageBuffers:
    """A replica's buffers by name, on ``device`` (None: wherever the user's are); ``own`` says that it may use the user's."""

    def __init__(self, model: nn.Module, device: torch.device | None, *, own: bool) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self._model, self._device, self._own = model, device, own
        self._places: list[tuple[str, nn.Module, str]] = []
        self._originals: dict[str, torch.Tensor] = {}  # of copies that are in an own buffer's place

    @property
    def copied(self) -> bool:
        """Whether there is a copy in the place of an own buffer."""
        return bool(self._originals)

    def learn(self, names: Iterable[str]) -> None:
        """Add what is not there yet."""
        for name in names:
            if name not in self.values:
                self.values[name] = self._ours(name, self._model.get_buffer(name))
                self._places.append((name, *place_of(self._model, name)))

    def follow(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take over buffers that the user has exchanged; returns those that ended and began here, and updates copies.

        Raises:
            FxChimeraError: A buffer is gone.
        """
        changed = []
        for name, holder, key in self._places:
            theirs, ours = holder._buffers[key], self.values[name]
            if theirs is None:
                raise FxChimeraError(f"buffer {name!r} is gone since the model was wrapped; wrap the model again")
            replaced = self._own and theirs is not self._originals.get(name, ours)
            if replaced or (theirs.shape, theirs.dtype, self._device or theirs.device) != (ours.shape, ours.dtype, ours.device):
                self.values[name] = self._ours(name, theirs)
                changed.append((ours, self.values[name]))
            elif name in self._originals:
                ours.copy_(theirs, non_blocking=True)
        return changed

    def _ours(self, name: str, theirs: torch.Tensor) -> torch.Tensor:
        """What is used for a buffer of the user's model."""
        self._originals.pop(name, None)
        if self._device is None or theirs.device == self._device:
            return theirs if self._own else theirs.detach().clone()
        if self._own:
            self._originals[name] = theirs
        return theirs.detach().to(self._device)


def place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the parameter or buffer ``name``, and its name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
