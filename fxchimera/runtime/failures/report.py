"""What a process leaves when a call has failed: the cause, what its ranks did last, and where its threads are.

The error names the cause; this file is for the questions after it.  It goes to the folder that ``FXCHIMERA_REPORTS`` names, else to
the system's folder for temporary files, and only its owner can read it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping

from fxchimera.schedule.timeline import Event

__all__ = ["KEPT_ACTIONS", "write_report"]

KEPT_ACTIONS = 100  # of each rank


def write_report(error: BaseException, recent: Mapping[int, Iterable[Event]]) -> str | None:
    """Write the report of this process; returns its path, None when it could not be written.

    Args:
        error: What the call raises.
        recent: By rank of this process, the last actions, with their times on this process's clock.
    """
    now = time.monotonic()
    lines = [f"{type(error).__name__}: {error}", f"process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}", ""]
    for rank, events in sorted(recent.items()):
        lines += [f"rank {rank}, its last actions: began, ended (seconds before this report), action", *_rows(events, now), ""]
    lines += ["the error", *"".join(traceback.format_exception(error)).splitlines(), "", "threads", *_stacks()]
    try:
        folder = os.environ.get("FXCHIMERA_REPORTS") or None
        handle, path = tempfile.mkstemp(prefix=f"fxchimera-rank{min(recent, default=0)}-", suffix=".txt", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError:  # the error itself matters more
        return None
    return path


def _rows(events: Iterable[Event], now: float) -> list[str]:
    return [f"  {event.start - now:10.4f}  {event.end - now:10.4f}  {event.action}" for event in events] or ["  none"]


def _stacks() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        found.append(f"{names.get(ident, ident)}:")
        found += [line.rstrip() for line in traceback.format_stack(frame)]
    return found
