"""The marker that a user puts into a forward where a stage shall end and the next begin.

It is an operator of torch without arguments, so the recorder's dispatch mode sees it wherever it is called, and a plain run does
nothing.  torch's own ``torch.distributed.pipelining.pipe_split()`` is such an operator too, and counts alike.
"""

from __future__ import annotations

import torch

__all__ = ["MARKERS", "split"]

_NAME = "fxchimera::split"
MARKERS = frozenset({_NAME, "pippy::_pipe_split"})
"""Names of the operators that mark a cut."""


def split() -> None:
    """Mark, in a forward, where one stage ends and the next begins; does nothing in a plain run.

    With D - 1 markers (2D - 1 for two stages a rank) :func:`fxchimera.pipeline` cuts there, unless it is given ``split_points``.
    A module that a marker is called in is recorded by its inner calls.
    """
    torch.ops.fxchimera.split()


def _nothing() -> None:
    """What the marker does."""


torch.library.define(_NAME, "() -> ()")
torch.library.impl(_NAME, "BackendSelect", _nothing)
torch.library.register_fake(_NAME, _nothing)
