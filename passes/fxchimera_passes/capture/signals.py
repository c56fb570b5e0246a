"""How a rule tells the capture loop that another module has to be closed or opened before the recording can be right.

They do not derive from ``Exception``: a model's own ``except Exception`` must not swallow them.
"""

from __future__ import annotations

from torch import nn

__all__ = ["NeedClose", "NeedOpen", "NeedSeed"]


class NeedClose(BaseException):
    """``module`` was opened and must be recorded as one call.

    At the root this is an error for the user, or costs the cut; with ``fatal`` it is an error always, as the model itself would not
    run right as one call either.
    """

    def __init__(self, module: nn.Module, reason: str, line: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.module, self.reason, self.line, self.fatal = module, reason, line, fatal


class NeedOpen(BaseException):
    """``module`` was recorded as one call, but ``reader`` read a tensor made inside it that is not part of its result."""

    def __init__(self, module: nn.Module, reader: nn.Module, reason: str, line: str) -> None:
        super().__init__(reason)
        self.module, self.reader, self.reason, self.line = module, reader, reason, line


class NeedSeed(BaseException):
    """``module`` was opened and draws from Python's or numpy's generator: it must be closed, or recorded for one seed."""

    def __init__(self, module: nn.Module, reason: str, line: str) -> None:
        super().__init__(reason)
        self.module, self.reason, self.line = module, reason, line
