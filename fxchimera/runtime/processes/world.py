"""The processes that take part: one (ranks are its threads) or one per rank of every pipeline (torchrun), behind one interface.

Collective calls of torch's are made by a helper thread, because gloo cannot be interrupted: the caller waits with a bound and
leaves as soon as another rank has failed.  Before each, and instead of it for a small tensor, the ranks exchange packets.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxchimera.errors import FxChimeraError, PipelineError
from fxchimera.runtime._torch import members_group, named_group
from fxchimera.runtime.caller import Caller
from fxchimera.runtime.devices.devices import HOST, Devices
from fxchimera.runtime.failures.failure import Cause, Failure, Limits
from fxchimera.runtime.failures.patience import Awaited
from fxchimera.runtime.failures.sharedfailure import GRACE_SECONDS, SharedFailure, make_store, resolve_cause
from fxchimera.runtime.grid import Grid
from fxchimera.runtime.processes.backends import NO_BACKENDS, Backends
from fxchimera.runtime.processes.circle import Circle
from fxchimera.runtime.processes.groups import connect, destroy, join, open_devices
from fxchimera.runtime.processes.layout import Layout, is_started
from fxchimera.runtime.processes.localworld import LocalWorld
from fxchimera.runtime.processes.packets import Packets
from fxchimera.runtime.processes.width import Width
from fxchimera.runtime.processes.wires import open_wires

__all__ = ["DistributedWorld", "LocalWorld", "World", "make_world"]

_PARTING_SECONDS = 10.0  # how long a rank that closes waits for the others


class World(Protocol):
    """All processes, of one pipeline or of several.

    Every process makes the same calls in the same order; ``what`` names one for the error when they do not.  ``ranks`` are the
    ranks of its pipeline that this process runs; ``process`` and ``num_processes`` its place among the processes; ``grid`` tells
    which process runs what, and ``counterparts`` are those of its rank in the other pipelines, if there are any.  ``devices`` is
    where ranks compute, and ``backends`` those of torch's that carry what goes between processes.
    """

    backends: Backends
    grid: Grid
    counterparts: Width | None
    ranks: tuple[int, ...]
    process: int
    num_processes: int
    failure: Failure
    devices: Devices

    def gather(self, value: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return every process's CPU tensor of one common shape and dtype, by process, on all processes."""

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return every process's object (pickled on the way), by process, on all processes."""

    def gather_in_pipeline(self, value: Any, what: str) -> list[Any]:
        """Return the objects of the processes of this one's pipeline, by rank."""

    def collect(self, value: Any, what: str) -> list[Any]:
        """Return every process's object, by process, on process 0, and [] elsewhere."""

    def spread(self, value: Any, what: str) -> Any:
        """Return process 0's object on all processes."""

    def column(self) -> dist.ProcessGroup | None:
        """Return torch's group of this process and its counterparts, made when it is first asked for; None for threads."""

    def part(self) -> None:
        """Wait, with a bound, until every process is about to close; nothing after a failure."""

    def close(self) -> None:
        """Release threads and connections; may be called more than once."""


class DistributedWorld:
    """One process a rank, over torch.distributed; as many pipelines as the processes make.

    Adopts the default process group, or makes one from torchrun's environment variables and destroys it on close.
    """

    def __init__(self, layout: Layout, limits: Limits) -> None:
        self.backends = NO_BACKENDS
        self._calls = _Collectives("fxchimera-collectives")
        width = layout.width()  # before joining: a rank that left again would break the others' joining
        if not dist.is_initialized():
            self._calls.leave = join(datetime.timedelta(seconds=limits.wait_seconds))
        self.devices = HOST
        timeout = datetime.timedelta(seconds=limits.wait_seconds)
        members = layout.members
        if members is None:
            self._group = dist.new_group(timeout=timeout, backend="gloo")
        else:
            self._group = members_group(members, timeout=timeout, backend="gloo")
        self.apart, self._groups = members is not None, 0
        self.process, self.num_processes = dist.get_rank(self._group), width * layout.num_ranks
        self.grid = layout.grid(self._group)
        self.ranks: tuple[int, ...] = (self.grid.rank,)
        store = make_store(self._group)
        self._shared = SharedFailure(limits, store, self.grid)
        self.failure: Failure = self._shared
        wires = open_wires(self._shared, "packets", self.process, Packets.channels(self.num_processes))
        self._packets = Packets(self.process, self.num_processes, wires)
        self.counterparts: Width | None = None
        self._pipeline: Circle | None = None
        self._column: dist.ProcessGroup | None = None
        if width > 1:
            devices = open_devices()
            pipeline, rank = self.grid.pipeline, self.grid.rank
            column = [row[rank] for row in self.grid.processes]
            self.counterparts = Width(connect(store, f"rank {rank}", self.process, column, devices, timeout), self.failure, rank)
            self._pipeline = Circle(connect(store, f"pipeline {pipeline}", self.process, self.grid.row, devices, timeout))
        others = tuple(process for process in range(self.num_processes) if process != self.process)
        self._awaited = Awaited(self.process, others, meeting=True)
        self._waiting = f"rank {self.process}, in an exchange among all ranks,"
        self._thread: threading.Thread | None = self._calls
        self._calls.start()
        self._announce("pipeline()")  # all are here
        self._shared.meet()

    def gather(self, value: torch.Tensor, what: str) -> list[torch.Tensor]:
        """All-gather one tensor: in the packets, or over gloo."""
        small = self._announce(f"{what} ({str(value.dtype).removeprefix('torch.')}{list(value.shape)})", value)
        if small is not None:
            return small

        def call() -> list[torch.Tensor]:
            gathered = [torch.empty_like(value) for _ in range(self.num_processes)]
            dist.all_gather(gathered, value, group=self._group)
            return gathered

        result: list[torch.Tensor] = self._run(call)
        return result

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """All-gather one object over gloo."""

        def call() -> list[Any]:
            gathered: list[Any] = [None] * self.num_processes
            dist.all_gather_object(gathered, value, group=self._group)
            return gathered

        self._announce(what)
        result: list[Any] = self._run(call)
        return result

    def gather_in_pipeline(self, value: Any, what: str) -> list[Any]:
        """All-gather one object within this process's pipeline."""
        pipeline = self._pipeline
        return self.gather_objects(value, what) if pipeline is None else list(self._run(lambda: pipeline.gather(value)))

    def collect(self, value: Any, what: str) -> list[Any]:
        """Gather one object on rank 0 over gloo."""

        def call() -> list[Any]:
            gathered: list[Any] | None = [None] * self.num_processes if self.process == 0 else None
            dist.gather_object(value, gathered, group=self._group, group_dst=0)
            return gathered or []

        self._announce(what)
        result: list[Any] = self._run(call)
        return result

    def spread(self, value: Any, what: str) -> Any:
        """Broadcast rank 0's object over gloo."""

        def call() -> Any:
            holder = [value if self.process == 0 else None]
            dist.broadcast_object_list(holder, group=self._group, group_src=0)
            return holder[0]

        self._announce(what)
        return self._run(call)

    def column(self) -> dist.ProcessGroup | None:
        """Make torch's group of the counterparts, with the backend of the default group."""
        self._check()
        if self._column is None:
            ranks = [dist.get_global_rank(self._group, row[self.grid.rank]) for row in self.grid.processes]
            timeout = datetime.timedelta(seconds=self.failure.limits.wait_seconds)
            self._column = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        return self._column

    def call(self, function: Callable[[], Any]) -> Any:
        """Collective: have the helper thread make calls of torch's, and return what they return."""
        return self._run(function)

    def new_group(self, processes: Sequence[int], *, backend: str, device: torch.device | None) -> dist.ProcessGroup | None:
        """Collective, all in one order: make torch's group of some processes; None for the others.

        Where other processes than the world's use torch's default group, as with a mesh, only the members take part.
        """
        ranks = sorted(dist.get_global_rank(self._group, process) for process in processes)
        timeout = datetime.timedelta(seconds=self.failure.limits.wait_seconds)
        self._groups += 1
        if not self.apart:
            group = dist.new_group(ranks, timeout=timeout, backend=backend, device_id=device, group_desc="fxchimera")
        elif self.process in processes:
            store = self._shared.store
            name = f"fxchimera {store.host} {store.port} {self._groups}"
            group = named_group(name, store, ranks, backend=backend, timeout=timeout, device=device)
        return group if self.process in processes else None

    def part(self) -> None:
        """Wait until all ranks are here: one that left early would take the failure store, or a message in flight, from them."""
        if self._thread is not None:
            self._shared.stop()  # before rank 0, which hosts the store, can have left: torch would write to the log about that
            with contextlib.suppress(FxChimeraError):
                self._announce("close()", seconds=_PARTING_SECONDS)

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
        del self._group
        self._packets.close()
        self._pipeline = None
        if self._column is not None:
            destroy(self._column)
        if self.counterparts is not None:
            self.counterparts.close()
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

    def _announce(self, what: str, value: torch.Tensor | None = None, seconds: float | None = None) -> list[torch.Tensor] | None:
        """Collective: see :meth:`Packets.exchange`."""
        self._check()
        try:
            with self.failure.patience(self._waiting, seconds, self._awaited if seconds is None else None) as between:
                return self._packets.exchange(what, value, between)
        except OSError as error:
            raise self._broken(error) from None

    def _run(self, call: Callable[[], Any]) -> Any:
        """Have the helper make a call, and return what it returns."""
        self._check()
        result = self.failure.wait(self._calls.ask(call), self._waiting, self._awaited)
        if isinstance(result, FxChimeraError):
            raise result
        if isinstance(result, Exception):
            raise self._broken(result)
        return result


class _Collectives(Caller):
    """Makes the collective calls; ``leave`` destroys torch's default group, if this pipeline is to do that."""

    leave: Callable[[], None] | None = None


def make_world(layout: Layout, limits: Limits) -> World:
    """Join the processes that torchrun (or the caller's own process group) has started, else make ranks of threads.

    Raises:
        FxChimeraError: The number of processes does not fit, or several pipelines are to be threads of one process.
    """
    if is_started():
        return DistributedWorld(layout, limits)
    layout.refuse_threads()
    return LocalWorld(layout.num_ranks, limits)
