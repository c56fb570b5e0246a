"""The threads that run this process's ranks: one each in local mode, the caller's own when the process is one rank."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fxchimera.runtime.context import CallerContext, casts_kept
from fxchimera.runtime.failure import Cause, Failure

__all__ = ["Crew", "OfRank"]

_JOIN_SECONDS = 2.0
_T = TypeVar("_T")


class OfRank(Protocol):
    """Whatever does the work of one rank."""

    rank: int


_Member = TypeVar("_Member", bound=OfRank)


class Crew(Generic[_Member]):
    """Calls every rank of this process, at the same time."""

    def __init__(self, members: Sequence[_Member], failure: Failure) -> None:
        self._members = members
        self._failure = failure
        self._workers = [_Worker(member.rank) for member in members] if len(members) > 1 else []
        for worker in self._workers:
            worker.start()

    def call(self, act: Callable[[_Member], _T]) -> list[_T]:
        """Call ``act`` with every member, on its thread, and return what it returns, by rank.

        Raises:
            PipelineError: A rank failed; raised once every rank of this process has stopped.
        """
        if not self._workers:
            with casts_kept():
                return [act(member) for member in self._members]
        context = CallerContext()
        answers: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()
        for worker, member in zip(self._workers, self._members, strict=True):
            worker.idle.clear()
            worker.tasks.put((partial(act, member), context, answers))
        outcomes: dict[int, tuple[bool, Any]] = {}
        try:
            while len(outcomes) < len(self._workers):
                rank, *outcome = answers.get()
                outcomes[rank] = outcome[0], outcome[1]
        except BaseException as interruption:  # Ctrl-C reaches the caller's thread only
            self._failure.report(Cause(-1, f"the caller was interrupted: {type(interruption).__name__}"))
            self._settle()
            raise
        self._raise_first({rank: value for rank, (good, value) in outcomes.items() if not good})
        return [outcomes[rank][1] for rank in sorted(outcomes)]

    def close(self) -> None:
        """End the threads; may be called more than once."""
        for worker in self._workers:
            worker.tasks.put(None)
        for worker in self._workers:
            if worker is not threading.current_thread():  # the garbage collector runs where it likes
                worker.join(timeout=_JOIN_SECONDS)
        self._workers = []
        self._members = []

    def _settle(self) -> None:
        """Wait until the ranks have left their present actions: nobody may write gradients while the caller restores them."""
        deadline = time.monotonic() + _JOIN_SECONDS
        for worker in self._workers:
            worker.idle.wait(max(deadline - time.monotonic(), 0.0))

    def _raise_first(self, errors: dict[int, BaseException]) -> None:
        if errors:
            cause = self._failure.cause
            raise errors[cause.rank] if cause is not None and cause.rank in errors else next(iter(errors.values()))


class _Worker(threading.Thread):
    def __init__(self, rank: int) -> None:
        super().__init__(name=f"fxchimera-rank-{rank}", daemon=True)
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.idle = threading.Event()
        self._rank = rank

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            act, context, answers = task
            good, outcome = True, None
            try:
                with casts_kept():
                    outcome = context.run(act)
            except BaseException as error:
                good, outcome = False, error
            answers.put((self._rank, good, outcome))
            self.idle.set()
            del task, act, context, answers, outcome  # a waiting thread keeps no batch alive


_Task = tuple[Callable[[], Any], CallerContext, "queue.SimpleQueue[tuple[int, bool, Any]]"]
