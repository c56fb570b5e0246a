"""The threads that run this process's ranks: one each in local mode, the caller's own when the process is one rank.

The caller waits for all of them, but not for ever: a thread cannot be ended from outside, and one that never returns from the
user's code is left to itself, after its neighbours, which wait for its messages, or the caller have named it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fxchimera.runtime.context import CallerContext, casts_kept
from fxchimera.runtime.failures.failure import Cause, Failure

__all__ = ["Crew", "OfRank"]

_JOIN_SECONDS = 2.0
_LOOK_SECONDS = 0.25  # between the caller's looks at its ranks
_LEAVE_SECONDS = 10.0  # how long a rank may go on with its present action after another has failed
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
            PipelineError: A rank failed; raised once every rank of this process has stopped, or could have.
        """
        if not self._workers:
            with casts_kept():
                return [act(member) for member in self._members]
        self._failure.check()
        context = CallerContext()
        answers: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()
        for worker, member in zip(self._workers, self._members, strict=True):
            worker.idle.clear()
            worker.tasks.put((partial(act, member), context, answers))
        outcomes: dict[int, tuple[bool, Any]] = {}
        try:
            self._collect(answers, outcomes)
        except BaseException as interruption:  # Ctrl-C reaches the caller's thread only
            self._failure.report(Cause(-1, f"the caller was interrupted: {type(interruption).__name__}"))
            self._settle()
            raise
        self._raise_first({rank: value for rank, (good, value) in outcomes.items() if not good}, self._still(outcomes))
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

    def _collect(self, answers: queue.SimpleQueue[tuple[int, bool, Any]], outcomes: dict[int, tuple[bool, Any]]) -> None:
        """Wait for the ranks' answers, after the first one with a bound."""
        limit, deadline, failed = self._failure.limits.wait_seconds, math.inf, False
        while (still := self._still(outcomes)) and time.monotonic() < deadline:
            try:
                rank, good, value = answers.get(timeout=_LOOK_SECONDS)
                outcomes[rank] = good, value
                deadline = min(deadline, time.monotonic() + limit)
            except queue.Empty:
                if not self._alive(still):
                    return
            if self._failure.cause is not None and not failed:
                deadline, failed = time.monotonic() + _LEAVE_SECONDS, True
        if still and not failed:
            self._failure.blame(still[0], f"others ended {limit:g} s ago; it is at: {self._failure.words(still[0])}")

    def _alive(self, ranks: Sequence[int]) -> bool:
        """Whether one of these is still at work; reports one whose thread has ended: an exception was thrown into it."""
        alive = {worker.rank for worker in self._workers if worker.is_alive()}
        for rank in ranks:
            if rank not in alive:
                self._failure.blame(rank, "its thread has ended, by an exception from outside of the pipeline")
        return not alive.isdisjoint(ranks)

    def _still(self, outcomes: Collection[int]) -> list[int]:
        return [member.rank for member in self._members if member.rank not in outcomes]

    def _raise_first(self, errors: dict[int, BaseException], still: list[int]) -> None:
        cause = self._failure.cause
        if not errors and not still:
            return
        error = next(iter(errors.values())) if cause is None else errors.get(cause.rank) or cause.error()
        for rank in still:
            where = self._failure.words(rank)
            error.add_note(f"The thread of rank {rank} has not returned from {where}; it may still write gradients.")
        raise error


class _Worker(threading.Thread):
    def __init__(self, rank: int) -> None:
        super().__init__(name=f"fxchimera-rank-{rank}", daemon=True)
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.idle = threading.Event()
        self.rank = rank

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            act, context, answers = task
            good, outcome = True, None
            try:
                with casts_kept():
                    outcome = context.run(act)
            except BaseException as error:
                good, outcome = False, error
            answers.put((self.rank, good, outcome))
            self.idle.set()
            del task, act, context, answers, outcome  # a waiting thread keeps no batch alive


_Task = tuple[Callable[[], Any], CallerContext, "queue.SimpleQueue[tuple[int, bool, Any]]"]
