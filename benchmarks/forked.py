"""Run a function in a forked process: with a time limit, and with the memory that it needed.

Memory is the resident set's high-water mark (``VmHWM``), which the kernel lets a process reset; an operator's memory does not go
through Python, so nothing inside the process would see it.  Linux only.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["Memory", "each", "peak"]


@dataclass(frozen=True, slots=True)
class Memory:
    """The most bytes resident while a function ran, in all and above what was resident before; 0 when it failed."""

    total: int
    above: int


def each(work: Callable[[str], Any], names: Sequence[str], *, limit: float, jobs: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, work(name))`` in the order of the ends, each made in a process of its own.

    What fails, dies or takes more than ``limit`` seconds gives its reason as text.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), list[tuple[str, Any, Connection, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            parent, child = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(work, waiting[0], child))
            process.start()
            child.close()
            running.append((waiting.pop(0), process, parent, time.monotonic() + limit))
        time.sleep(0.01)
        for entry in list(running):
            name, process, pipe, end = entry
            if not pipe.poll() and time.monotonic() < end:
                continue
            running.remove(entry)
            yield name, _result(process, pipe, f"no result within {limit:g} s")


def peak(function: Callable[[], Any], *, warm: Callable[[], Any], limit: float) -> Memory:
    """Run ``function`` once in a forked process and return the memory that it took, apart from what ``warm`` takes for good."""

    def work(_: str) -> Memory:
        warm()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        function()
        most = _status("VmHWM")
        return Memory(most, most - before)

    (_, found), *_ = each(work, [""], limit=limit)
    return found if isinstance(found, Memory) else Memory(0, 0)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _child(work: Callable[[str], Any], name: str, pipe: Connection) -> None:
    try:
        pipe.send(work(name))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _result(process: Any, pipe: Connection, late: str) -> Any:
    found: Any = late
    if pipe.poll():
        try:
            found = pipe.recv()
        except EOFError:
            process.join()
            return f"the process died with exit code {process.exitcode}"
        process.join(5)
    if process.is_alive():
        process.kill()
    return found
