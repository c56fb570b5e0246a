"""A failure that every process hears of, through a store on a free port of rank 0."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from fxchimera.runtime.failure import Cause, Failure, Limits

__all__ = ["GRACE_SECONDS", "SharedFailure", "make_store", "resolve_cause"]

GRACE_SECONDS = 2.0  # how long a broken connection waits for the cause behind it
_POLL_SECONDS = 0.1
_CAUSE = "cause"


class SharedFailure(Failure):
    """A failure that is published through a ``store``, and looked for there by a watcher thread."""

    def __init__(self, limits: Limits, store: Store) -> None:
        super().__init__(limits)
        self.store = store
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="fxchimera-failures", daemon=True)
        self._watcher.start()

    def report(self, cause: Cause) -> Cause:
        """Publish the cause, unless another rank was first."""
        first = cause
        with contextlib.suppress(Exception):  # without the store the local cause must do
            rank, _, text = self.store.compare_set(_CAUSE, "", f"{cause.rank}\n{cause.text}").decode().partition("\n")
            first = Cause(int(rank), text)
        return super().report(first)

    def stop(self) -> None:
        """End the watcher."""
        self._stopped.set()
        self._watcher.join(timeout=GRACE_SECONDS)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                if not self.store.check([_CAUSE]):
                    continue
                rank, _, text = self.store.get(_CAUSE).decode().partition("\n")
                super().report(Cause(int(rank), text))
            except Exception as error:
                if not self._stopped.is_set():
                    super().report(Cause(0, f"the failure store, which rank 0 hosts, is gone: {error}"))
            return


def resolve_cause(failure: Failure, cause: Cause) -> Cause:
    """Return the cause behind a broken connection: another rank's, when it shows up within the grace time, else ``cause``."""
    deadline = time.monotonic() + GRACE_SECONDS
    while failure.cause is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return failure.cause or failure.report(cause)


def make_store(group: dist.ProcessGroup) -> Store:
    """Collective: rank 0 hosts a store on a free port of the rendezvous address; everybody connects."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store: Store | None = None
    port = 0
    if dist.get_rank() == 0:
        hosted = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        store, port = hosted, hosted.port
    ports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ports, port, group=group)
    return store if store is not None else TCPStore(host, ports[0], is_master=False, wait_for_workers=False)
