"""The threads that run this process's ranks: one each in local mode, the caller's own when the process is one rank."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from fxchimera.runtime.context import CallerContext
from fxchimera.runtime.executor import Executor
from fxchimera.runtime.failure import Cause, Failure
from fxchimera.runtime.job import Job, Result

__all__ = ["Crew"]

_JOIN_SECONDS = 2.0


class Crew:
    """Runs a job on every rank of this process, at the same time."""

    def __init__(self, executors: Sequence[Executor], failure: Failure) -> None:
        self._executors = executors
        self._failure = failure
        self._workers = [_Worker(executor) for executor in executors] if len(executors) > 1 else []
        for worker in self._workers:
            worker.start()

    def run(self, job: Job) -> list[Result]:
        """Run the job and return the ranks' results, by rank.

        Raises:
            PipelineError: A rank failed; raised once every rank of this process has stopped.
        """
        if not self._workers:
            return [executor.run(job) for executor in self._executors]
        context = CallerContext()
        answers: queue.SimpleQueue[tuple[int, Result | BaseException]] = queue.SimpleQueue()
        for worker in self._workers:
            worker.idle.clear()
            worker.tasks.put((job, context, answers))
        outcomes: dict[int, Result | BaseException] = {}
        try:
            while len(outcomes) < len(self._workers):
                rank, outcome = answers.get()
                outcomes[rank] = outcome
        except BaseException as interruption:  # Ctrl-C reaches the caller's thread only
            self._failure.report(Cause(-1, f"the caller was interrupted: {type(interruption).__name__}"))
            self._settle()
            raise
        self._raise_first(outcomes)
        return [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Result)]

    def close(self) -> None:
        """End the threads; may be called more than once."""
        for worker in self._workers:
            worker.tasks.put(None)
        for worker in self._workers:
            if worker is not threading.current_thread():  # the garbage collector runs where it likes
                worker.join(timeout=_JOIN_SECONDS)
        self._workers = []
        self._executors = []

    def _settle(self) -> None:
        """Wait until the ranks have left their present actions: nobody may write gradients while the caller restores them."""
        deadline = time.monotonic() + _JOIN_SECONDS
        for worker in self._workers:
            worker.idle.wait(max(deadline - time.monotonic(), 0.0))

    def _raise_first(self, outcomes: dict[int, Result | BaseException]) -> None:
        errors = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        if errors:
            cause = self._failure.cause
            raise errors[cause.rank] if cause is not None and cause.rank in errors else next(iter(errors.values()))


class _Worker(threading.Thread):
    def __init__(self, executor: Executor) -> None:
        super().__init__(name=f"fxchimera-rank-{executor.rank}", daemon=True)
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.idle = threading.Event()
        self._executor = executor

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            job, context, answers = task
            outcome: Result | BaseException
            try:
                outcome = context.run(_bound(self._executor, job))
            except BaseException as error:
                outcome = error
            answers.put((self._executor.rank, outcome))
            self.idle.set()
            del task, job, context, answers, outcome  # a waiting thread keeps no batch alive


_Task = tuple[Job, CallerContext, "queue.SimpleQueue[tuple[int, Result | BaseException]]"]


def _bound(executor: Executor, job: Job) -> Callable[[], Result]:
    return lambda: executor.run(job)
