"""Tells transformers that values can be read while a model is recorded.

On fake tensors it takes the general path, because other tracers cannot read values: an attention mask that masks nothing is built
and passed, which keeps the fused causal kernels from running and sums in another order than the plain model.  A recording follows
the plain model's path and guards what it read of the inputs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["values_readable"]

_MODULE, _QUESTION = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def values_readable(readable: Callable[[Any], bool]) -> Iterator[None]:
    """Have transformers take a tensor for a real one, in this thread, where ``readable`` says that its value can be read."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _QUESTION, None)
    if module is None or original is None:
        yield
        return
    owner = threading.get_ident()

    def is_fake_tensor(value: Any) -> bool:
        return bool(original(value)) and not (threading.get_ident() == owner and readable(value))

    setattr(module, _QUESTION, is_fake_tensor)
    try:
        yield
    finally:
        setattr(module, _QUESTION, original)
