"""``fxchimera demo``: a GPT-2 of transformers trained through the pipeline on the Python language reference."""

from __future__ import annotations

from fxchimera.demo.run import Options as Options
from fxchimera.demo.run import Result as Result
from fxchimera.demo.run import run as run

__all__ = ["Options", "Result", "run"]
