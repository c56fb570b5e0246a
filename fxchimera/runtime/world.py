"""The processes that take part: one (ranks are its threads) or one per rank (torchrun), behind one small interface.

Collective calls are made by a helper thread, because gloo cannot be interrupted: the caller waits with a bound and leaves as
soon as another rank has failed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from fxchimera.errors import FxChimeraError, PipelineError
from fxchimera.runtime.failure import Cause, Failure, Limits

__all__ = ["DistributedWorld", "LocalWorld", "World", "destroy", "make_world", "resolve_cause"]

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # how long a broken connection waits for the cause behind it
_PARTING_SECONDS = 10.0  # how long a rank that closes waits for the others
_CAUSE = "cause"


class World(Protocol):
    """All processes of one pipeline.

    ``ranks`` are the ranks this process runs; ``process`` and ``num_processes`` its place among the processes.
    """

    ranks: tuple[int, ...]
    process: int
    num_processes: int
    failure: Failure

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return every process's CPU tensor of one common shape and dtype, by process, on all processes."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every process's object (pickled on the way), by process, on all processes."""

    def collect(self, value: Any) -> list[Any]:
        """Return every process's object, by process, on process 0, and [] elsewhere."""

    def spread(self, value: Any) -> Any:
        """Return process 0's object on all processes."""

    def part(self) -> None:
        """Wait, with a bound, until every process is about to close; nothing after a failure."""

    def close(self) -> None:
        """Release threads and connections; may be called more than once."""


class LocalWorld:
    """Every rank is a thread of this process."""

    def __init__(self, num_ranks: int, limits: Limits) -> None:
        self.ranks = tuple(range(num_ranks))
        self.process = 0
        self.num_processes = 1
        self.failure = Failure(limits)

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the only process's value."""
        return [value]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the only process's value."""
        return [value]

    def collect(self, value: Any) -> list[Any]:
        """Return the only process's value."""
        return [value]

    def spread(self, value: Any) -> Any:
        """Return the only process's value."""
        return value

    def part(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to release."""


class DistributedWorld:
    """One process a rank, over torch.distributed.

    Adopts the default process group, or makes one from torchrun's environment variables and destroys it on close.
    """

    def __init__(self, num_ranks: int, limits: Limits) -> None:
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limits.wait_seconds))
        if dist.get_world_size() != num_ranks:
            found, rank = dist.get_world_size(), dist.get_rank()
            self._leave()
            raise FxChimeraError(
                f"the schedule needs {num_ranks} ranks (num_stages={num_ranks}), but torch.distributed has a world of {found} "
                f"(this is rank {rank}); start with torchrun --nproc-per-node {num_ranks}, or pass num_stages={found}"
            )
        self.process = dist.get_rank()
        self.num_processes = num_ranks
        self.ranks: tuple[int, ...] = (self.process,)
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=limits.wait_seconds))
        self.failure: Failure = _SharedFailure(limits, _make_store(self._group))
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(target=self._serve, name="fxchimera-collectives", daemon=True)
        self._thread.start()

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """All-gather one tensor over gloo."""

        def call() -> list[torch.Tensor]:
            gathered = [torch.empty_like(value) for _ in range(self.num_processes)]
            dist.all_gather(gathered, value, group=self._group)
            return gathered

        result: list[torch.Tensor] = self._run(call)
        return result

    def gather_objects(self, value: Any) -> list[Any]:
        """All-gather one object over gloo."""

        def call() -> list[Any]:
            gathered: list[Any] = [None] * self.num_processes
            dist.all_gather_object(gathered, value, group=self._group)
            return gathered

        result: list[Any] = self._run(call)
        return result

    def collect(self, value: Any) -> list[Any]:
        """Gather one object on rank 0 over gloo."""

        def call() -> list[Any]:
            gathered: list[Any] | None = [None] * self.num_processes if self.process == 0 else None
            dist.gather_object(value, gathered, group=self._group, group_dst=0)
            return gathered or []

        result: list[Any] = self._run(call)
        return result

    def spread(self, value: Any) -> Any:
        """Broadcast rank 0's object over gloo."""

        def call() -> Any:
            holder = [value if self.process == 0 else None]
            dist.broadcast_object_list(holder, group=self._group, group_src=0)
            return holder[0]

        return self._run(call)

    def part(self) -> None:
        """Wait until all ranks are here: one that left early would take the failure store, or a message in flight, from them."""
        if self._thread is not None:
            with contextlib.suppress(PipelineError):
                self._run(lambda: dist.barrier(group=self._group), _PARTING_SECONDS)

    def close(self) -> None:
        """End the helper threads and leave the groups this object made."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        if self.failure.cause is not None and self.process == 0:
            time.sleep(_GRACE_SECONDS / 2)  # the others learn the cause from the store that ends with this rank
        self._calls.put(None)
        thread.join(timeout=_GRACE_SECONDS)
        if not thread.is_alive():
            destroy(self._group)
        del self._group
        assert isinstance(self.failure, _SharedFailure)
        self.failure.stop()
        self._leave()

    def _leave(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, call: Callable[[], Any], seconds: float | None = None) -> Any:
        self.failure.check()
        if self._thread is None:
            raise FxChimeraError("this pipeline has been closed; wrap the model again to go on")
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((call, answer))
        result = self.failure.wait(answer, f"rank {self.process}, in an exchange among all ranks,", seconds)
        if isinstance(result, Exception):
            raise resolve_cause(self.failure, Cause(self.process, f"an exchange among all ranks broke: {result}")).error()
        return result

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, answer = item
            try:
                answer.put(call())
            except Exception as error:
                answer.put(error)


class _SharedFailure(Failure):
    """A failure that is published through a store, and looked for there by a watcher thread."""

    def __init__(self, limits: Limits, store: Store) -> None:
        super().__init__(limits)
        self._store = store
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="fxchimera-failures", daemon=True)
        self._watcher.start()

    def report(self, cause: Cause) -> Cause:
        """Publish the cause, unless another rank was first."""
        first = cause
        with contextlib.suppress(Exception):  # without the store the local cause must do
            rank, _, text = self._store.compare_set(_CAUSE, "", f"{cause.rank}\n{cause.text}").decode().partition("\n")
            first = Cause(int(rank), text)
        return super().report(first)

    def stop(self) -> None:
        """End the watcher."""
        self._stopped.set()
        self._watcher.join(timeout=_GRACE_SECONDS)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                if not self._store.check([_CAUSE]):
                    continue
                rank, _, text = self._store.get(_CAUSE).decode().partition("\n")
                super().report(Cause(int(rank), text))
            except Exception as error:
                if not self._stopped.is_set():
                    super().report(Cause(0, f"the failure store, which rank 0 hosts, is gone: {error}"))
            return


def make_world(num_ranks: int, limits: Limits) -> World:
    """Join the processes that torchrun (or the caller's own process group) has started, else make ranks of threads."""
    started = dist.is_available() and (dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ))
    return DistributedWorld(num_ranks, limits) if started else LocalWorld(num_ranks, limits)


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group and close its connections, unless the user has destroyed all groups already."""
    with contextlib.suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)


def resolve_cause(failure: Failure, cause: Cause) -> Cause:
    """Return the cause behind a broken connection: another rank's, when it shows up within the grace time, else ``cause``."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while failure.cause is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return failure.cause or failure.report(cause)


def _make_store(group: dist.ProcessGroup) -> Store:
    """Rank 0 hosts a store on a free port of the rendezvous address; everybody connects."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store: Store | None = None
    port = 0
    if dist.get_rank() == 0:
        hosted = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        store, port = hosted, hosted.port
    ports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ports, port, group=group)
    return store if store is not None else TCPStore(host, ports[0], is_master=False, wait_for_workers=False)
