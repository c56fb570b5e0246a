"""The names of torch's backends that this run uses between processes; what they carry is in ``carriers``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_BACKENDS", "Backends"]


@dataclass(frozen=True, slots=True)
class Backends:
    """What carries ``messages`` within a pipeline, and ``sums`` over the pipelines; None: it goes through the host's memory."""

    messages: str | None = None
    sums: str | None = None


NO_BACKENDS = Backends()
