"""Start one process a rank on this machine, and time one step that all of them take part in."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp

__all__ = ["on_ranks", "run_step"]


def on_ranks(work: Callable[..., Any], size: int, *args: Any, realtime: bool = False) -> Any:
    """Call ``work(rank, *args)`` in ``size`` processes of one thread, joined over gloo; return what rank 0 returned (as JSON).

    ``realtime`` runs them under SCHED_RR, which needs the right to.
    """
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.pipelining"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torch_mp.start_processes(_rank, (work, size, args, port, result, realtime), nprocs=size, start_method="forkserver")
        return json.loads(result.read_text())


def _rank(rank: int, work: Callable[..., Any], size: int, args: tuple[Any, ...], port: int, result: Path, realtime: bool) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    returned = work(rank, *args)
    if rank == 0:
        result.write_text(json.dumps(returned))
    dist.barrier()
    dist.destroy_process_group()


def run_step(step: Callable[[], object]) -> tuple[float, float]:
    """Run one step on every rank; return latest end minus earliest start, and the ranks' mean processor time, in seconds."""
    dist.barrier()
    start, busy = time.monotonic(), time.process_time()
    step()
    busy = time.process_time() - busy
    span = torch.tensor([-start, time.monotonic()], dtype=torch.float64)  # [2]: one MAX reduction finds both extremes
    dist.all_reduce(span, dist.ReduceOp.MAX)
    total = torch.tensor([busy], dtype=torch.float64)
    dist.all_reduce(total)
    return float(span.sum()), float(total) / dist.get_world_size()
