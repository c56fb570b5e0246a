"""The processes that take part: one (ranks are its threads) or one per rank (torchrun), behind one small interface.

Collective calls are made by a helper thread, because gloo cannot be interrupted: the caller waits with a bound and leaves as
soon as another rank has failed.  What a small tensor needs, one call, the caller starts itself, which spares it the way there.
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

from fxchimera.errors import FxChimeraError, PipelineError
from fxchimera.runtime.failure import Cause, Failure, Limits
from fxchimera.runtime.groups import Packets, connect, destroy, join, open_devices
from fxchimera.runtime.sharedfailure import GRACE_SECONDS, SharedFailure, make_store, resolve_cause

__all__ = ["DistributedWorld", "LocalWorld", "World", "make_world"]

_PARTING_SECONDS = 10.0  # how long a rank that closes waits for the others


class World(Protocol):
    """All processes of one pipeline.

    Every process makes the same calls in the same order; ``what`` names one for the error when they do not.  ``ranks`` are the
    ranks this process runs; ``process`` and ``num_processes`` its place among the processes.
    """

    ranks: tuple[int, ...]
    process: int
    num_processes: int
    failure: Failure

    def gather(self, value: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return every process's CPU tensor of one common shape and dtype, by process, on all processes."""

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return every process's object (pickled on the way), by process, on all processes."""

    def collect(self, value: Any, what: str) -> list[Any]:
        """Return every process's object, by process, on process 0, and [] elsewhere."""

    def spread(self, value: Any, what: str) -> Any:
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

    def gather(self, value: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return the only process's value."""
        return [value]

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return the only process's value."""
        return [value]

    def collect(self, value: Any, what: str) -> list[Any]:
        """Return the only process's value."""
        return [value]

    def spread(self, value: Any, what: str) -> Any:
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
        self._calls = _Collectives()
        _check_size(num_ranks)  # before joining: a rank that left again would break the others' joining
        if not dist.is_initialized():
            self._calls.leave = join(datetime.timedelta(seconds=limits.wait_seconds))
        self.process = dist.get_rank()
        self.num_processes = num_ranks
        self.ranks: tuple[int, ...] = (self.process,)
        timeout = datetime.timedelta(seconds=limits.wait_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        store = make_store(self._group)
        self._shared = SharedFailure(limits, store, self.process, num_ranks)
        self.failure: Failure = self._shared
        self._packets = Packets(connect(store, "packets", self.process, range(num_ranks), open_devices(), timeout))
        self._thread: threading.Thread | None = self._calls
        self._calls.start()

    def gather(self, value: torch.Tensor, what: str) -> list[torch.Tensor]:
        """All-gather one tensor over gloo."""
        self._check()
        name = f"{what} ({str(value.dtype).removeprefix('torch.')}{list(value.shape)})"
        try:
            announced = self._packets.begin(name, value)
        except Exception as error:
            raise self._broken(error) from error

        def call() -> list[torch.Tensor]:
            small = announced()
            if small is not None:
                return small
            gathered = [torch.empty_like(value) for _ in range(self.num_processes)]
            dist.all_gather(gathered, value, group=self._group)
            return gathered

        result: list[torch.Tensor] = self._run(call)
        return result

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """All-gather one object over gloo."""

        def call() -> list[Any]:
            self._packets.begin(what, None)()
            gathered: list[Any] = [None] * self.num_processes
            dist.all_gather_object(gathered, value, group=self._group)
            return gathered

        result: list[Any] = self._run(call)
        return result

    def collect(self, value: Any, what: str) -> list[Any]:
        """Gather one object on rank 0 over gloo."""

        def call() -> list[Any]:
            self._packets.begin(what, None)()
            gathered: list[Any] | None = [None] * self.num_processes if self.process == 0 else None
            dist.gather_object(value, gathered, group=self._group, group_dst=0)
            return gathered or []

        result: list[Any] = self._run(call)
        return result

    def spread(self, value: Any, what: str) -> Any:
        """Broadcast rank 0's object over gloo."""

        def call() -> Any:
            self._packets.begin(what, None)()
            holder = [value if self.process == 0 else None]
            dist.broadcast_object_list(holder, group=self._group, group_src=0)
            return holder[0]

        return self._run(call)

    def part(self) -> None:
        """Wait until all ranks are here: one that left early would take the failure store, or a message in flight, from them."""
        if self._thread is not None:
            self._shared.stop()  # before rank 0, which hosts the store, can have left: torch would write to the log about that
            with contextlib.suppress(FxChimeraError):
                self._run(lambda: self._packets.begin("close()", None)(), _PARTING_SECONDS)

    def close(self) -> None:
        """End the helper threads and leave the groups this object made."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        if self.failure.cause is not None and self.process == 0:
            time.sleep(GRACE_SECONDS / 2)  # the others learn the cause from the store that ends with this rank
        self._calls.tasks.put(None)
        thread.join(timeout=GRACE_SECONDS)
        if not thread.is_alive():
            destroy(self._group)
        del self._group, self._packets
        self._shared.stop()
        self._leave()

    def _leave(self) -> None:
        """Destroy the default group if this object made it, or leave that to another pipeline that still uses it."""
        leave, self._calls.leave = self._calls.leave, None
        others = [thread for thread in threading.enumerate() if isinstance(thread, _Collectives) and thread is not self._calls]
        if leave is not None and others:
            others[0].leave = leave
        elif leave is not None:
            leave()

    def _check(self) -> None:
        self.failure.check()
        if self._thread is None:
            raise FxChimeraError("this pipeline has been closed; wrap the model again to go on")

    def _broken(self, error: Exception) -> PipelineError:
        return resolve_cause(self.failure, Cause(self.process, f"an exchange among all ranks broke: {error}")).error()

    def _run(self, call: Callable[[], Any], seconds: float | None = None) -> Any:
        self._check()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.tasks.put((call, answer))
        result = self.failure.wait(answer, f"rank {self.process}, in an exchange among all ranks,", seconds)
        if isinstance(result, FxChimeraError):
            raise result
        if isinstance(result, Exception):
            raise self._broken(result)
        return result


class _Collectives(threading.Thread):
    """Makes the collective calls of one pipeline, one after the other; ``tasks`` ends with None.

    ``leave`` destroys torch's default group, if this pipeline is to do that.
    """

    def __init__(self) -> None:
        super().__init__(name="fxchimera-collectives", daemon=True)
        self.tasks: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self.leave: Callable[[], None] | None = None

    def run(self) -> None:
        while (item := self.tasks.get()) is not None:
            call, answer = item
            try:
                answer.put(call())
            except Exception as error:
                answer.put(error)


def _check_size(num_ranks: int) -> None:
    """Refuse a world of another size than the schedule's, be it joined already or only announced by torchrun."""
    joined = dist.is_initialized()
    found = dist.get_world_size() if joined else int(os.environ["WORLD_SIZE"])
    if found != num_ranks:
        rank = dist.get_rank() if joined else int(os.environ["RANK"])
        raise FxChimeraError(
            f"the schedule needs {num_ranks} ranks (num_stages={num_ranks}), but torch.distributed has a world of {found} "
            f"(this is rank {rank}); start with torchrun --nproc-per-node {num_ranks}, or pass num_stages={found}"
        )


def make_world(num_ranks: int, limits: Limits) -> World:
    """Join the processes that torchrun (or the caller's own process group) has started, else make ranks of threads."""
    started = dist.is_available() and (dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ))
    return DistributedWorld(num_ranks, limits) if started else LocalWorld(num_ranks, limits)
