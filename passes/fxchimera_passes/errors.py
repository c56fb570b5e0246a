"""The errors of fxchimera's passes, and the base class of every error the product raises.

A message says what was found (names, both numbers, the user's file:line where there is one) and what to do about it.
"""

from __future__ import annotations

__all__ = ["CaptureError", "FxChimeraError", "PartitionError"]


class FxChimeraError(Exception):
    """Base class of every error that fxchimera raises on purpose."""


class CaptureError(FxChimeraError):
    """The model cannot be recorded as a graph; the message names the user's file:line."""


class PartitionError(FxChimeraError):
    """The recorded graph cannot be cut into the stages asked for."""
