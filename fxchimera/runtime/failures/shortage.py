"""Running out of memory, told with what the plan had predicted, so that the two can be compared."""

from __future__ import annotations

import torch

__all__ = ["is_shortage"]

_HOST = "DefaultCPUAllocator: "  # torch's allocator of host memory raises a plain RuntimeError (tried on torch 2.13)


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says that there is no memory left, on a device or on the host."""
    host = isinstance(error, RuntimeError) and _HOST in str(error) and "allocate" in str(error)
    return host or isinstance(error, (MemoryError, torch.OutOfMemoryError))
