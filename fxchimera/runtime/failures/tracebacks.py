"""Tracebacks that end where the user's call of the pipeline does.

Below that call are a dozen frames of ours, which tell somebody who presses Ctrl-C, or whose neighbour has failed, nothing; with
eight ranks they fill the screen.  The user's own exception, which is the cause of a failure, keeps all of its frames, and so does
everything when the environment variable ``FXCHIMERA_TRACEBACKS`` is ``full``.
"""

from __future__ import annotations

import os
from types import TracebackType

__all__ = ["shorten"]

_VARIABLE, _FULL = "FXCHIMERA_TRACEBACKS", "full"


def shorten(error: BaseException, helpers: tuple[str, ...]) -> bool:
    """Cut the frames below the public call off the traceback of ``error``, in place; tells whether there were any.

    Args:
        error: What a public call is about to raise, as its context managers see it.
        helpers: Names of the functions, context managers mostly, whose frames come before that of the call.
    """
    here: TracebackType | None = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_name in helpers:
        here = here.tb_next
    if here is None or here.tb_next is None or os.environ.get(_VARIABLE) == _FULL:
        return False
    here.tb_next = None
    return True
