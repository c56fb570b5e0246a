"""Real gloo processes for tests: started once, kept, and killed when one of their calls does not end in time.

    pytest --pipe--> worker 0 .. 3: wait for (function, arguments, environment), run it, send back what it returned or raised

The environment is torchrun's.  The rendezvous store lives here, on a port that the system chose, as it does in torchrun's agent:
no port is picked first and bound later, so parallel test runs cannot collide.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from fxchimera_passes.soundness import checked_reads
from tests.errorpage.watch import RECORDER

__all__ = ["Pool"]

_ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS = 60.0  # of one call; generous, because test machines are shared
_DUMP_SECONDS = 0.5


class Pool:
    """Up to ``size`` processes; ``run`` uses the first few of them as ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self._dumps = Path(tempfile.mkdtemp(prefix="fxchimera-tests-"))

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, limit: float = _LIMIT_SECONDS, spoils: bool = False
    ) -> list[Any]:
        """Call ``function(*args)`` in ``size`` processes at once, as the ranks of one job, and return what they return, by rank.

        The test fails when a process raises, dies, or does not answer within ``limit`` seconds; with ``spoils`` the processes
        are replaced afterwards, because the call leaves them with broken connections.
        """
        store = self._begin(size, function, args, limit)
        answers = self._collect(range(size), limit)
        del store
        failures = [rank for rank in range(size) if answers.get(rank, (False, ""))[0] is not True]
        if failures:
            report = self._report(size, answers)
            self.stop()
            pytest.fail(report, pytrace=False)
        if spoils:
            self.stop()
        return [answers[rank][1] for rank in range(size)]

    def survivors(
        self, size: int, lost: int, function: Callable[..., Any], *args: Any, limit: float = _LIMIT_SECONDS
    ) -> dict[int, Any]:
        """Call ``function(*args)`` in ``size`` processes, of which the rank ``lost`` will not answer; return what the others do.

        All processes are replaced afterwards.  The test fails when one of the others raises, or does not answer in time.
        """
        store = self._begin(size, function, args, limit)
        others = [rank for rank in range(size) if rank != lost]
        answers = self._collect(others, limit)
        del store
        report = self._report(size, answers) if any(answers.get(rank, (False, ""))[0] is not True for rank in others) else ""
        self.stop()
        if report:
            pytest.fail(report, pytrace=False)
        return {rank: answers[rank][1] for rank in others}

    def stop(self) -> None:
        """Kill the processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _begin(self, size: int, function: Callable[..., Any], args: tuple[Any, ...], limit: float) -> TCPStore:
        """Give every process its task; the store returned is to be kept until they have answered."""
        if not self._workers:
            self._start()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit))
        for rank in range(size):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            self._workers[rank][1].send_bytes(pickle.dumps((function, args, environment)))
        return store

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "fxchimera.api", "tests.workers"])
        with _environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT / "passes")))}):
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self._dump(rank)), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))

    def _collect(self, ranks: Sequence[int], limit: float) -> dict[int, tuple[bool, Any]]:
        """Wait for the answers of ``ranks``; a process that dies answers with its exit code."""
        deadline = time.monotonic() + limit
        waiting = {self._workers[rank][1]: rank for rank in ranks}
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), left):
                assert isinstance(connection, multiprocessing.connection.Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank], hits = pickle.loads(connection.recv_bytes())
                    RECORDER.add(hits)
                except EOFError:
                    process = self._workers[rank][0]
                    process.join(1.0)
                    answers[rank] = (False, f"died with exit code {process.exitcode}")
        return answers

    def _report(self, size: int, answers: dict[int, tuple[bool, Any]]) -> str:
        """Say what every rank did, with the stacks of those that hang."""
        hanging = [rank for rank in range(size) if rank not in answers]
        for rank in hanging:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        if hanging:
            time.sleep(_DUMP_SECONDS)
        lines = []
        for rank in range(size):
            done, value = answers.get(rank, (False, f"has not answered; its stacks:\n{self._dump(rank).read_text()}"))
            lines.append(f"rank {rank} " + ("ended well" if done else str(value)))
        return "\n".join(lines)

    def _dump(self, rank: int) -> Path:
        return self._dumps / f"rank{rank}.txt"


def _serve(connection: multiprocessing.connection.Connection, dump: Path) -> None:
    """A worker's life."""
    RECORDER.install()
    with dump.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                function, args, environment = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            with _environment(environment), checked_reads():
                try:
                    answer = (True, function(*args))
                except BaseException:
                    answer = (False, f"raised\n{traceback.format_exc()}")
            # pickled here: torch's own way of sending tensors shares memory that dies with this process
            connection.send_bytes(pickle.dumps((answer, RECORDER.take())))


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
