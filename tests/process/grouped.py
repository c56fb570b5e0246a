"""Runs what a rank of a test does with torch's process groups as the transport; nothing else about it changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["over_groups"]


def over_groups(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` so that ``pipeline()`` takes "groups" where it would choose by itself; the pool undoes that."""
    os.environ["FXCHIMERA_TRANSPORT"] = "groups"
    return function(*args)
