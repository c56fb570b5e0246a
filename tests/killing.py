"""Kills a process at a chosen point of what it does: before its k-th system call, or after some time.

The process is a fork of this one, so it begins in the middle of things and costs milliseconds.  The tracer is Linux's ptrace: what
Python does and what a library in another language does is stopped alike.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

__all__ = ["can_trace", "killed_after", "killed_at"]

_TRACEME, _SYSCALL, _SETOPTIONS, _EXITKILL_AND_MARK = 0, 24, 0x4200, 0x100001
_MARKED = signal.SIGTRAP | 0x80
_LIMIT_SECONDS = 60.0


def can_trace() -> bool:
    """Whether this system lets a process trace its own child."""
    return sys.platform == "linux" and killed_at(lambda: None, None) > 0


def killed_at(call: Callable[[], None], stop: int | None) -> int:
    """Run ``call`` in a fork and kill that before its system call number ``stop``.

    Returns the number of system calls that it has begun by then, all when ``stop`` is None or above; 0 if it cannot be traced.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    child = os.fork()
    if child == 0:
        if libc.ptrace(_TRACEME, 0, None, None) != 0:
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)
        _run(call)
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        return 0
    libc.ptrace(_SETOPTIONS, child, None, _EXITKILL_AND_MARK)
    begun, entering, passed = 0, True, 0
    while True:
        libc.ptrace(_SYSCALL, child, None, passed)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            return begun
        passed = 0
        if os.WSTOPSIG(status) != _MARKED:
            passed = os.WSTOPSIG(status)
            continue
        if entering and stop is not None and begun == stop:
            os.kill(child, signal.SIGKILL)  # while it is stopped at the door: the call is not made
            os.waitpid(child, 0)
            return begun
        begun += entering
        entering = not entering


def killed_after(call: Callable[[], None], seconds: float) -> bool:
    """Run ``call`` in a fork and kill that after some time; returns whether it was still at work."""
    child = os.fork()
    if child == 0:
        _run(call)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _run(call: Callable[[], None]) -> None:
    """In the fork: nothing of the parent's may run on after it."""
    code = 1
    try:
        signal.alarm(int(_LIMIT_SECONDS))
        call()
        code = 0
    finally:
        os._exit(code)
