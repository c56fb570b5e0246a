"""Emulated devices: how long one step takes when a device is a process that sleeps, ours beside torch.distributed.pipelining.

Every device does ``--forward-ms`` and ``--backward-ms`` of sleep a micro-batch in total (a schedule with two stages a device halves
them), so devices do not compete for cores and what is measured is the schedule and the cost of the runtime around it.  Messages
go over gloo.  All schedules live in the same processes and take turns, one step each a round, so a busy machine slows all alike.

A makespan is the latest end minus the earliest start over the ranks on one monotonic clock; the figure is the median of the rounds.

    python benchmarks/emulated.py --stages 4 --microbatches 8 [--boundary-bytes 1048576] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp
from sleeping import SleepingStage, squared_error
from torch_peers import PEERS, ideal_seconds, make_peer

import fxchimera
from fxchimera.schedule import Costs, lower, make_order, simulate

ROWS = 4  # rows of a micro-batch
OURS = ("1f1b", "chimera")

Steps = dict[tuple[str, str], Callable[[], object]]  # (whose, schedule) -> one step of it on this rank
Table = dict[str, dict[str, dict[str, float]]]  # whose -> schedule -> figure -> milliseconds


def our_simulated_seconds(name: str, stages: int, microbatches: int, forward: float, backward: float) -> float:
    """Return the makespan that our simulator predicts for these costs with free communication, in seconds."""
    order = make_order(name, stages, microbatches)
    return simulate(lower(order), Costs.uniform(stages, forward, backward)).makespan


def make_ours(name: str, args: argparse.Namespace, batch: torch.Tensor) -> fxchimera.Pipeline:
    """Wrap a chain of sleeping stages by the one line."""
    forward, backward = args.forward_ms / 1e3, args.backward_ms / 1e3
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(SleepingStage(batch.shape[1], forward, backward, first=i == 0) for i in range(args.stages)))
    return fxchimera.pipeline(
        model,
        example_args=(batch,),
        loss_fn=squared_error,
        num_stages=args.stages,
        n_microbatches=args.microbatches,
        schedule=name,
    )


def make_steps(args: argparse.Namespace, rank: int, cleanup: ExitStack) -> tuple[Steps, Table]:
    """Build every schedule on this rank: the steps to time, and the table with the predicted figures filled in."""
    stages, microbatches = args.stages, args.microbatches
    forward, backward = args.forward_ms / 1e3, args.backward_ms / 1e3
    width = max(1, args.boundary_bytes // (4 * ROWS))
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(ROWS * microbatches, width, generator=generator)
    target = torch.randn(ROWS * microbatches, width, generator=generator)
    steps: Steps = {}
    table: Table = {"ours": {}, "torch": {}}
    for name in [n for n in OURS if n != "chimera" or stages % 2 == 0] if not args.only_torch else []:
        pipe = cleanup.enter_context(make_ours(name, args, batch))
        steps["ours", name] = partial(pipe.step, batch, target=target)
        table["ours"][name] = {"simulated_ms": 1e3 * our_simulated_seconds(name, stages, microbatches, forward, backward)}
    for name in PEERS:
        try:
            peer = make_peer(name, rank, stages, microbatches, forward, backward, width)
        except ValueError as refusal:
            if rank == 0:
                print(f"torch refuses {name}: {str(refusal).strip().splitlines()[0]}", file=sys.stderr)
            continue
        steps["torch", name] = peer.step_function(batch, target)
        table["torch"][name] = {"ideal_ms": 1e3 * ideal_seconds(peer, forward, backward)}
    return steps, table


def makespan_seconds(step: Callable[[], object]) -> float:
    """Run one step on every rank; return latest end minus earliest start, in seconds."""
    dist.barrier()
    start = time.monotonic()
    step()
    span = torch.tensor([-start, time.monotonic()], dtype=torch.float64)  # [2]: one MAX reduction finds both extremes
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return float(span.sum())


def worker(rank: int, args: argparse.Namespace, port: int, result: str) -> None:
    """Be one device: build every schedule, measure, and leave the table of rank 0 in the file ``result``."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.stages), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    with ExitStack() as cleanup:
        steps, table = make_steps(args, rank, cleanup)
        measure(steps, table, args.repeats)
        if rank == 0:
            Path(result).write_text(json.dumps(table))
        dist.barrier()
    dist.destroy_process_group()


def measure(steps: Steps, table: Table, repeats: int) -> None:
    """Warm every schedule up, let them take turns, and enter the medians into the table."""
    spans: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for step in steps.values():
        makespan_seconds(step)
    for _ in range(repeats):
        for key, step in steps.items():
            spans[key].append(makespan_seconds(step))
    for (whose, name), seconds in spans.items():
        table[whose][name]["measured_ms"] = 1e3 * statistics.median(seconds)


def run(args: argparse.Namespace) -> Table:
    """Start one process a device and return the table that rank 0 wrote."""
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.pipelining"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "table.json")
        torch_mp.start_processes(worker, (args, port, result), nprocs=args.stages, start_method="forkserver")
        return json.loads(Path(result).read_text())


def show(table: Table, args: argparse.Namespace) -> None:
    """Print the table: measured, predicted with free communication, their ratio, and the idle share of a device."""
    work_ms = args.microbatches * (args.forward_ms + args.backward_ms)
    print(
        f"D={args.stages} N={args.microbatches} F={args.forward_ms} ms B={args.backward_ms} ms boundary={args.boundary_bytes} bytes"
    )
    print(f"{'schedule':<24}{'measured ms':>12}{'predicted ms':>14}{'ratio':>8}{'idle':>8}")
    for whose, rows in table.items():
        for name, row in rows.items():
            measured = row["measured_ms"]
            predicted = row.get("simulated_ms", row.get("ideal_ms", float("nan")))
            label = f"{whose} {name}"
            print(f"{label:<24}{measured:>12.1f}{predicted:>14.1f}{measured / predicted:>8.3f}{1 - work_ms / measured:>8.1%}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="devices, and stages of the model (D)")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step (N)")
    parser.add_argument("--boundary-bytes", type=int, default=1024, help="bytes that cross a cut a micro-batch")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="forward of one micro-batch on one device")
    parser.add_argument("--backward-ms", type=float, default=40.0, help="backward of one micro-batch on one device")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the median is reported")
    parser.add_argument("--realtime", action="store_true", help="SCHED_RR, against other load on the machine (needs the right to)")
    parser.add_argument("--only-torch", action="store_true", help="leave our schedules out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print."""
    args = parse()
    table = run(args)
    if args.json:
        print(json.dumps(table))
    else:
        show(table, args)


if __name__ == "__main__":
    main()
