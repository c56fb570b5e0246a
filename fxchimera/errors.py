"""The errors a user of fxchimera may meet; all of them derive from :class:`FxChimeraError`."""

from __future__ import annotations

from fxchimera_passes.errors import CaptureError, FxChimeraError, PartitionError

__all__ = [
    "BatchError",
    "CaptureError",
    "CoarseCutWarning",
    "FxChimeraError",
    "NonFiniteLossError",
    "PartitionError",
    "PipelineError",
    "ScheduleError",
]


class CoarseCutWarning(UserWarning):
    """The model was cut into fewer pieces than stages, so that some ranks compute nothing; the message says why and what to do.

    ``warnings.filterwarnings("error", category=fxchimera.CoarseCutWarning)`` makes an error of it.
    """


class ScheduleError(FxChimeraError, ValueError):
    """An order cannot be made, read, lowered, proven or drawn; the message names the actions."""


class BatchError(FxChimeraError, ValueError):
    """A batch cannot be divided into micro-batches, or differs between ranks."""


class PipelineError(FxChimeraError, RuntimeError):
    """A step failed while running; the message names rank, stage, direction, micro-batch and action."""


class NonFiniteLossError(FxChimeraError, ArithmeticError):
    """A step's loss is nan or infinite; no gradient was changed, on any rank, and the pipeline can go on."""
