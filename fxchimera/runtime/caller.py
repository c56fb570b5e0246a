"""A thread that makes calls which cannot be interrupted, so that who wants their results can wait with a bound."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from fxchimera_passes._torch import record_ranges

__all__ = ["Answer", "Caller"]

Answer = queue.SimpleQueue[Any]


class Caller(threading.Thread):
    """Makes calls one after the other; ``tasks`` ends with None."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.tasks: queue.SimpleQueue[tuple[Callable[[], Any], Answer] | None] = queue.SimpleQueue()

    def ask(self, call: Callable[[], Any]) -> Answer:
        """Return where the call's result, or the exception that it raised, will be."""
        answer: Answer = queue.SimpleQueue()
        self.tasks.put((call, answer))
        return answer

    def run(self) -> None:
        """Make the calls."""
        record_ranges(False)  # see fxchimera/runtime/processes/groups.py
        while (item := self.tasks.get()) is not None:
            call, answer = item
            try:
                answer.put(call())
            except Exception as error:
                answer.put(error)
            del item, call, answer  # a waiting thread keeps no buffer alive
