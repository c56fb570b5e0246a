"""Train a PyTorch model that is too big or too slow for one device on several, by wrapping it in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxchimera.api import Pipeline as Pipeline
    from fxchimera.api import pipeline as pipeline
    from fxchimera.api import reference as reference
    from fxchimera.errors import BatchError as BatchError
    from fxchimera.errors import CaptureError as CaptureError
    from fxchimera.errors import CoarseCutWarning as CoarseCutWarning
    from fxchimera.errors import FxChimeraError as FxChimeraError
    from fxchimera.errors import PartitionError as PartitionError
    from fxchimera.errors import PipelineError as PipelineError
    from fxchimera.errors import ScheduleError as ScheduleError
    from fxchimera_passes.marker import split as split

__all__ = [
    "BatchError",
    "CaptureError",
    "CoarseCutWarning",
    "FxChimeraError",
    "NonFiniteLossError",
    "PartitionError",
    "Pipeline",
    "PipelineError",
    "ScheduleError",
    "pipeline",
    "reference",
    "split",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that ``fxchimera.schedule`` stays free of torch."""
    if name in ("Pipeline", "pipeline", "reference"):
        from fxchimera import api

        return getattr(api, name)
    if name == "split":
        from fxchimera_passes import marker

        return marker.split
    if name in __all__:
        from fxchimera import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'fxchimera' has no attribute {name!r}")
