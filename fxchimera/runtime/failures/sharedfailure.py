"""A failure that every process hears of, through a store on a free port of rank 0."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fxchimera.runtime.addresses import own_address
from fxchimera.runtime.failures.failure import Cause, Failure, Limits
from fxchimera.runtime.failures.patience import Awaited
from fxchimera.runtime.failures.place import Place
from fxchimera.runtime.failures.pulse import Pulse
from fxchimera.runtime.grid import Grid

__all__ = ["GRACE_SECONDS", "SharedFailure", "make_store", "raise_cause", "resolve_cause"]

GRACE_SECONDS = 2.0  # how long a broken connection waits for the cause behind it
_POLL_SECONDS = 0.1
_ENDING_SECONDS = 1.0
_CAUSE, _NEWS = "cause", "news for {}"
_EVER = datetime.timedelta(days=1000)


class SharedFailure(Failure):
    """A failure that is published through a ``store``; a watcher thread on every rank waits there for news.

    The watcher sleeps in the store until there is news for its rank: asking ten times a second took more of a core, with the
    eight ranks of a few pipelines, than the work itself.
    """

    def __init__(self, limits: Limits, store: TCPStore, grid: Grid) -> None:
        super().__init__(limits, grid)
        self.store = store
        self._rank, self._size = grid.process, grid.width * grid.depth
        self._stopped, self._lost = threading.Event(), threading.Event()
        self.place = Place()
        self._pulse = Pulse(store, self._rank, self._size, self.place, publish=self._publish, note=self._note)
        # a connection of its own: another thread's call would wait until the news are there
        self._wire = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        self._watcher = threading.Thread(target=self._watch, name="fxchimera-failures", daemon=True)
        self._watcher.start()

    def report(self, cause: Cause) -> Cause:
        """Publish the cause, unless another rank was first."""
        if self.cause is not None:
            return self.cause
        answer: queue.SimpleQueue[Cause] = queue.SimpleQueue()
        first = cause
        if not self._lost.is_set():
            # on a thread of its own, because a store whose process is frozen does not answer, and the caller must not wait for it
            threading.Thread(target=self._spread, args=(cause, answer), name="fxchimera-report", daemon=True).start()
            with contextlib.suppress(queue.Empty):
                first = answer.get(timeout=GRACE_SECONDS)
        return super().report(first)

    def _spread(self, cause: Cause, answer: queue.SimpleQueue[Cause]) -> None:
        """Tell the store; the answer is the cause that it was told first."""
        first = cause
        try:
            rank, _, text = self.store.compare_set(_CAUSE, "", f"{cause.rank}\n{cause.text}").decode().partition("\n")
            first = Cause(int(rank), text)
            for other in range(self._size):
                self.store.set(_NEWS.format(other), "")
        except Exception:  # without the store the local cause must do
            self._lost.set()
        answer.put(first)

    def _publish(self, process: int, text: str) -> None:
        self.report(self.cause_in(process, text))

    def _note(self, process: int, text: str) -> None:
        super().report(self.cause_in(process, text))

    def meet(self) -> None:
        """Called when all processes have joined."""
        self._pulse.meet()

    def look(self) -> None:
        """Notice when rank 0 does not answer."""
        self._pulse.look()

    def mark(self, member: int, words: bytes) -> None:
        """Write down where this process is."""
        self.place.write(words)

    def words(self, member: int) -> str | None:
        """What a process has written down."""
        return str(self.place) if member == self._rank else self._pulse.words(member)

    def names(self) -> dict[str, int]:
        """All processes."""
        grid = self.grid
        if grid.width == 1:
            return {f"rank {rank}": process for rank, process in enumerate(grid.row)}
        return {f"pipeline {w}, its rank {r}": one for w, row in enumerate(grid.processes) for r, one in enumerate(row)}

    def inquire(self) -> None:
        """Have the pulse listen to all others."""
        self._pulse.inquire()

    def message(self, source: int, destination: int) -> Awaited:
        """A rank of this process's pipeline waits for another's message."""
        row = self.grid.row
        return Awaited(row[destination], (row[source],))

    def stop(self) -> None:
        """End the watcher and the pulse."""
        self._stopped.set()
        self._pulse.stop(None if self.cause is None else _POLL_SECONDS)
        self.place.remove()
        # after a failure the store may be frozen, with the watcher in it, and with a report of this process that keeps others out
        patience = GRACE_SECONDS if self.cause is None else _POLL_SECONDS
        if self._watcher.is_alive() and not self._lost.is_set():
            waking = threading.Thread(target=self._wake, name="fxchimera-wake", daemon=True)
            waking.start()
            waking.join(timeout=patience)
        self._watcher.join(timeout=patience)

    def _wake(self) -> None:
        """End the watcher's wait."""
        with contextlib.suppress(Exception):  # without the store the watcher has ended
            self.store.set(_NEWS.format(self._rank), "")

    def _watch(self) -> None:
        try:
            self._wire.wait([_NEWS.format(self._rank)], _EVER)
            if not self._stopped.is_set():
                rank, _, text = self._wire.get(_CAUSE).decode().partition("\n")
                super().report(Cause(int(rank), text))
        except Exception as error:
            self._lost.set()
            if not self._stopped.is_set():
                self._note(0, self._fate_of_host() or f"the failure store, which it hosts, is gone: {error}")

    def _fate_of_host(self) -> str | None:
        """Ask what has become of process 0; one that ends closes its connections before the system says so."""
        deadline = time.monotonic() + _ENDING_SECONDS
        while (found := self._pulse.fate_of(0)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found

    def fate_of(self, process: int) -> str | None:
        """Say what has become of another process, as far as the system of this machine knows; None while nothing is wrong."""
        return self._pulse.fate_of(process)


def resolve_cause(failure: Failure, cause: Cause) -> Cause:
    """Return the cause behind a broken connection to a process, which is ``cause.rank``.

    That is another rank's, when it shows up within the grace time, or that the process is gone; else ``cause``.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while failure.cause is None and time.monotonic() < deadline:
        failure.look()  # when process 0 is frozen, the one that has closed its connections may have noticed first
        if (fate := failure.fate_of(cause.rank)) is not None:
            return failure.report(failure.cause_in(cause.rank, fate))
        time.sleep(_POLL_SECONDS)
    return failure.cause or failure.report(cause)


def raise_cause(failure: Failure) -> None:
    """Raise another rank's failure, if one is known or becomes known within the grace time.

    Raises:
        PipelineError: There is one.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while failure.cause is None and time.monotonic() < deadline:
        failure.look()
        time.sleep(_POLL_SECONDS)
    failure.check()


def make_store(group: dist.ProcessGroup) -> TCPStore:
    """Collective: the first rank of the group hosts a store on a free port, and everybody connects.

    torch's rank 0 is reached at the rendezvous address; another rank at the address of the interface that leads there.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    places: list[Any] = [None] * dist.get_world_size(group)
    store: TCPStore | None = None
    if dist.get_rank(group) == 0:
        host = host if dist.get_rank() == 0 else own_address(host, int(os.environ.get("MASTER_PORT", "1")))
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    dist.all_gather_object(places, (host, store.port) if store is not None else None, group=group)
    host, port = places[0]
    return store if store is not None else TCPStore(host, port, is_master=False, wait_for_workers=False)
