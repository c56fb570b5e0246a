"""The compiler passes under the product's own name: ``fxchimera.passes.capture`` and its kin."""

from __future__ import annotations

from fxchimera_passes.captured import Captured as Captured
from fxchimera_passes.captured import CaptureReport as CaptureReport
from fxchimera_passes.plan import Stage as Stage
from fxchimera_passes.plan import StagePlan as StagePlan

__all__ = ["CaptureReport", "Captured", "Stage", "StagePlan"]
