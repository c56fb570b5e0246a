"""Emulated devices: how long one step takes when a device is a process that sleeps, ours beside torch.distributed.pipelining.

Every device does ``--forward-ms`` and ``--backward-ms`` of sleep a micro-batch in total (a schedule with two stages a device halves
them), so devices do not compete for cores and what is measured is the schedule and the cost of the runtime around it.  Messages
go over gloo.  All schedules live in the same processes and take turns, one step each a round, so a busy machine slows all alike.

    measured    latest end minus earliest start of a step over the ranks, on one monotonic clock; the median of the rounds
    ideal       with sleeps that are exact and messages that are free
    simulated   with stages and messages as slow as plain torch runs them here, measured just before (machine.py)
    first       the very first step over a measured one
    cpu         processor time a computation, of all threads; with ``--forward-ms 0 --backward-ms 0`` the cost of the runtime

"auto-1" and "auto-2" are the orders that the search finds, with one and two copies of the weights, for these costs and what each
action costs our runtime beside them (by how much a step of our 1f1b takes longer than simulated).

    python benchmarks/emulated.py --stages 4 --microbatches 8 [--boundary-bytes 1048576] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from launched import on_ranks, run_step
from machine import hop_seconds, stage_excess_seconds
from sleeping import SleepingStage, squared_error
from torch_peers import PEERS, ideal_seconds, make_peer

import fxchimera
from fxchimera.schedule import Costs, SyncEdge, lower, make_order, simulate
from fxchimera.schedule.auto import auto
from fxchimera.schedule.limits import Limits
from fxchimera.schedule.order import Order

ROWS = 4  # rows of a micro-batch
OURS = ("1f1b", "chimera", "auto-1", "auto-2")
_SMALLEST_MS = 1e-3  # the search needs costs above 0
_WARM, _TRIED = 2, 5  # steps that show what our runtime costs

Steps = dict[tuple[str, str], Callable[[], object]]  # (whose, schedule) -> one step of it on this rank
Table = dict[str, dict[str, dict[str, float]]]  # whose -> schedule -> figure -> milliseconds


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine adds, in seconds: to a forward, to either half of a backward, and on a message's way.

    ``action`` is what our runtime adds to every action, for the search alone: split or not, a backward is one or two of these.
    """

    forward: float = 0.0
    half: float = 0.0
    hop: float = 0.0
    action: float = 0.0

    def costs(self, args: argparse.Namespace, total: int) -> Costs:
        """What ``total`` stages cost on it, of which a device has ``total / args.stages``."""
        share = args.stages / total / 1e3
        forward = max(args.forward_ms, _SMALLEST_MS) * share + self.forward + self.action
        half = max(args.backward_ms / 2, _SMALLEST_MS) * share + self.half
        part, whole = half + self.action, 2 * half + self.action
        return Costs(
            forward=(forward,) * total,
            input_grad=(part,) * total,
            weight_grad=(part,) * total,
            backward=(whole,) * total,
            latency=self.hop,
        )


def measure_machine(args: argparse.Namespace) -> Machine:
    """Collective: measure with plain torch, the same on all ranks."""
    width = _width(args)
    excess = stage_excess_seconds(args.forward_ms / 1e3, args.backward_ms / 1e3, (ROWS, width))
    return Machine(*excess, hop_seconds(args.boundary_bytes))


def find_orders(args: argparse.Namespace, machine: Machine) -> dict[str, Order]:
    """Make our orders, of computations only; the search is told what the devices take."""
    stages, microbatches = args.stages, args.microbatches
    orders = {}
    for name in args.ours.split(",") if args.ours else []:
        if name.startswith("auto"):
            orders[name] = search(args, machine, int(name[-1]))
        elif name != "chimera" or stages % 2 == 0:
            orders[name] = make_order(name, stages, microbatches)
    return orders


def search(args: argparse.Namespace, machine: Machine, copies: int) -> Order:
    """Return the best order found, by what it takes on this machine, with one and with two stages a device.

    Either number is searched for with its own costs, because two half stages cost a device twice what it adds to one.
    """
    found = []
    for chunks in (1, 2):
        added = Machine(chunks * machine.forward, chunks * machine.half, machine.hop, chunks * machine.action)
        costs = added.costs(args, args.stages)
        found.append(auto(args.stages, args.microbatches, costs, Limits(copies=copies, chunks=chunks)).order)
    return min(found, key=lambda order: simulated_seconds(order, args, machine))


def simulated_seconds(order: Order, args: argparse.Namespace, machine: Machine) -> float:
    """Return what our simulator predicts for a step, in seconds, the exchange between the replicas included."""
    owners, *mirrors = order.placement.pipes
    edges = [
        SyncEdge(stage, rank, owner)
        for ranks in mirrors
        for stage, (rank, owner) in enumerate(zip(ranks, owners, strict=True))
        if rank != owner
    ]
    return simulate(lower(order, sync=edges), machine.costs(args, order.placement.num_stages)).makespan


def make_ours(order: Order, args: argparse.Namespace, batch: torch.Tensor) -> fxchimera.Pipeline:
    """Wrap a chain of sleeping stages by the one line."""
    total = order.placement.num_stages
    forward, backward = (milliseconds / 1e3 * args.stages / total for milliseconds in (args.forward_ms, args.backward_ms))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(SleepingStage(batch.shape[1], forward, backward, first=i == 0) for i in range(total)))
    return fxchimera.pipeline(
        model,
        example_args=(batch,),
        loss_fn=squared_error,
        num_stages=args.stages,
        n_microbatches=args.microbatches,
        schedule=order,
        split_points=[str(i) for i in range(1, total)],
    )


def action_seconds(args: argparse.Namespace, machine: Machine, batch: torch.Tensor, target: torch.Tensor) -> float:
    """Collective: what our runtime adds to an action, from how much longer steps of our 1f1b take than simulated."""
    order = make_order("1f1b", args.stages, args.microbatches)
    with make_ours(order, args, batch) as pipe:
        spans = [run_step(partial(pipe.step, batch, target=target))[0] for _ in range(_WARM + _TRIED)]
    longer: float = statistics.median(spans[_WARM:]) - simulated_seconds(order, args, machine)
    actions: int = 2 * (args.microbatches + args.stages - 1)  # on the critical path
    return max(longer, 0.0) / actions


def make_steps(args: argparse.Namespace, rank: int, cleanup: ExitStack) -> tuple[Steps, Table]:
    """Build every schedule on this rank: the steps to time, and the table with the predicted figures filled in."""
    forward, backward = args.forward_ms / 1e3, args.backward_ms / 1e3
    machine, width = measure_machine(args), _width(args)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(ROWS * args.microbatches, width, generator=generator)
    target = torch.randn(ROWS * args.microbatches, width, generator=generator)
    own = action_seconds(args, machine, batch, target) if "auto" in args.ours else 0.0
    orders = [find_orders(args, replace(machine, action=own)) if rank == 0 else None]
    dist.broadcast_object_list(orders)
    steps: Steps = {}
    added = {f"{name}_ms": 1e3 * value for name, value in asdict(replace(machine, action=own)).items()}
    table: Table = {"ours": {}, "torch": {}, "machine": {"all": added}}
    for name, order in (orders[0] or {}).items():
        pipe = cleanup.enter_context(make_ours(order, args, batch))
        steps["ours", name] = partial(pipe.step, batch, target=target)
        table["ours"][name] = {
            "ideal_ms": 1e3 * simulated_seconds(order, args, Machine()),
            "simulated_ms": 1e3 * simulated_seconds(order, args, machine),
            "actions": sum(action.kind.is_compute for _, action in order) / args.stages,
        }
    for name in PEERS:
        try:
            peer = make_peer(name, rank, args.stages, args.microbatches, forward, backward, width)
        except ValueError as refusal:
            if rank == 0:
                print(f"torch refuses {name}: {str(refusal).strip().splitlines()[0]}", file=sys.stderr)
            continue
        steps["torch", name] = peer.step_function(batch, target)
        table["torch"][name] = {"ideal_ms": 1e3 * ideal_seconds(peer, forward, backward), "actions": peer.actions}
    return steps, table


def work(rank: int, args: argparse.Namespace) -> Table:
    """Be one device: build every schedule and measure."""
    with ExitStack() as cleanup:
        steps, table = make_steps(args, rank, cleanup)
        measure(steps, table, args.repeats)
        return table


def measure(steps: Steps, table: Table, repeats: int) -> None:
    """Warm every schedule up, let them take turns, and enter the medians into the table."""
    rounds: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in steps}
    for (whose, name), step in steps.items():
        table[whose][name]["first_ms"] = 1e3 * run_step(step)[0]
        for _ in range(_WARM - 1):
            run_step(step)
    for _ in range(repeats):
        for key, step in steps.items():
            rounds[key].append(run_step(step))
    for (whose, name), found in rounds.items():
        row = table[whose][name]
        row["measured_ms"] = 1e3 * statistics.median(span for span, _ in found)
        row["cpu_ms"] = 1e3 * statistics.median(busy for _, busy in found) / row["actions"]
    table["machine"]["all"]["load"] = os.getloadavg()[0]


def show(table: Table, args: argparse.Namespace) -> None:
    """Print the table: measured, predicted, their ratios, and the step time over that of torch's best schedule."""
    print(
        f"D={args.stages} N={args.microbatches} F={args.forward_ms} ms B={args.backward_ms} ms",
        f"boundary={args.boundary_bytes} bytes",
        *(f"{name} {value:.3f}" for name, value in table["machine"]["all"].items()),
        sep="; ",
    )
    best = min((row["measured_ms"] for row in table["torch"].values()), default=float("nan"))
    print(
        f"{'schedule':<24}{'measured ms':>12}{'ideal':>8}{'ratio':>8}"
        f"{'simulated':>11}{'ratio':>8}{'of best':>9}{'first':>8}{'cpu ms':>8}"
    )
    for whose in ("ours", "torch"):
        for name, row in table[whose].items():
            measured, ideal, simulated = row["measured_ms"], row["ideal_ms"], row.get("simulated_ms", 0.0)
            print(
                f"{whose + ' ' + name:<24}{measured:>12.1f}{ideal:>8.1f}{_ratio(measured, ideal):>8}"
                f"{simulated:>11.1f}{_ratio(measured, simulated):>8}{_ratio(measured, best):>9}"
                f"{_ratio(row['first_ms'], measured):>8}{row['cpu_ms']:>8.3f}"
            )


def _width(args: argparse.Namespace) -> int:
    """Columns of a micro-batch, so that it has the wanted bytes."""
    wanted: int = args.boundary_bytes
    return max(1, wanted // (4 * ROWS))


def _ratio(above: float, below: float) -> str:
    return f"{above / below:.3f}" if below > 1.0 else "-"  # below a millisecond there is nothing to compare with


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
    parser.add_argument("--ours", default=",".join(OURS), help="our schedules, with commas between; none if empty")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print."""
    args = parse()
    table = on_ranks(work, args.stages, args, realtime=args.realtime)
    if args.json:
        print(json.dumps(table))
    else:
        show(table, args)


if __name__ == "__main__":
    main()
