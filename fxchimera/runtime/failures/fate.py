"""What has become of another process: alive, stopped or gone, as far as the system of this machine can tell.

A process number alone is not enough: it is given out again, and means another process in another container or on another machine.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Fate", "Identity"]

_PROC = Path("/proc")


class Fate(enum.Enum):
    """``UNKNOWN`` is every process of another machine, and of a system without ``/proc``."""

    ALIVE = "alive"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of one machine: its number there, and when it began (clock ticks after the machine did), "" where unknown."""

    machine: str
    pid: int
    born: str

    @classmethod
    def own(cls) -> Identity:
        """The identity of this process."""
        return cls(_machine(), os.getpid(), _look(os.getpid())[1])

    def fate(self) -> Fate:
        """Ask the system."""
        if not self.machine or self.machine != _machine():
            return Fate.UNKNOWN
        state, born = _look(self.pid)
        if born != self.born or state in ("Z", "X"):  # a zombie has ended, and its parent has not looked yet
            return Fate.GONE
        return Fate.STOPPED if state == "T" else Fate.ALIVE

    def __str__(self) -> str:
        return f"{self.machine},{self.pid},{self.born}"

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Read what ``str`` gave."""
        machine, pid, born = text.split(",")
        return cls(machine, int(pid), born)


def _machine() -> str:
    """This start of this machine, and the space of process numbers that its processes see; "" without ``/proc``."""
    try:
        started = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{started}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _look(pid: int) -> tuple[str, str]:
    """Return the state of a process, one letter, and when it began; empty strings when there is none."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()  # its name may hold spaces and brackets
    except OSError:
        return "", ""
    return fields[0], fields[19]
