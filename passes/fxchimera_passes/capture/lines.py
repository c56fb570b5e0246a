"""Finds the line of the user's own code that is running: the innermost one outside torch, this package and Python itself."""

from __future__ import annotations

import os
import sys
import sysconfig
import types

import torch

__all__ = ["first_line", "in_distributions", "line_of", "outside_torch", "user_line"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DISTRIBUTIONS = _TORCH + "distributions" + os.sep
_CALLER = "fxchimera"  # the package that wraps models: its lines are no user's, and beyond it nothing runs the model
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def user_line(*, beyond: str = "") -> str:
    """Return "file:line" of the user's code that the current call came from, "" when there is none.

    With ``beyond`` it is the code that called into that file.
    """
    frame: types.FrameType | None = sys._getframe(1)
    passed = not beyond
    while frame is not None:
        name = frame.f_code.co_filename
        passed = passed or name == beyond
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == _CALLER:
            return ""
        if passed and not _is_ours(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def in_distributions() -> bool:
    """Tell whether the current torch call was made by the code of ``torch.distributions`` itself."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTIONS)


def outside_torch(frame: types.FrameType) -> bool:
    """Tell whether ``frame`` runs the user's code, or a library's, but not torch's or ours."""
    return not _is_ours(frame.f_code.co_filename)


def _is_ours(name: str) -> bool:
    if name.startswith((_PACKAGE, _TORCH, "<")):
        return True
    return name.startswith(_STANDARD) and "site-packages" not in name and "dist-packages" not in name


def line_of(error: BaseException) -> str:
    """Return "file:line" of the innermost user's code that ``error`` passed through, "" when there is none."""
    found, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not _is_ours(name):
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``."""
    return next(iter(str(error).splitlines()), "")
