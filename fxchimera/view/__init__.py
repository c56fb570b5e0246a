"""Draw timelines: as text, as SVG, as a Chrome trace for Perfetto.  Predicted and measured runs are drawn alike; no torch here."""

from __future__ import annotations

from fxchimera.view.drawing import Drawing

__all__ = ["Drawing"]
