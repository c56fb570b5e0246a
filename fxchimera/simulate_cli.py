"""``fxchimera simulate`` and ``fxchimera compare``: what a schedule costs before a model is there.

simulate prints one schedule's certificate (or one JSON object), and writes its picture and its CSV; compare prints a table of all
published schedules and of the search's best on the same costs.  No torch is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Costs, Limits, Order, auto, certify, check, lower, make_order, schedules, simulate
from fxchimera.schedule.certificate import Certificate
from fxchimera.schedule.infer import read_order
from fxchimera.schedule.profile import SyncEdge

__all__ = ["add_verbs"]


@dataclass(frozen=True, slots=True)
class _Row:
    """One schedule with its figures.

    Args:
        order: The compute-only order.
        costs: With one entry a stage of its placement.
        certificate: Its figures.
        seconds: Time it took to make the order.
        shape: The shape that the search chose; empty for a given schedule.
        any_shape: The bound of all shapes that the search was allowed.
    """

    order: Order
    costs: Costs
    certificate: Certificate
    seconds: float
    shape: str = ""
    any_shape: float = 0.0

    def as_dict(self) -> dict[str, object]:
        share = self.certificate.bubble / self.certificate.makespan if self.certificate.makespan else 0.0
        found = {**self.certificate.as_dict(), "bubble_share": share, "compile_seconds": self.seconds}
        return {**found, "shape": self.shape, "lower_bound_any_shape": self.any_shape} if self.shape else found


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the two verbs."""
    one = verbs.add_parser("simulate", help="print what a schedule costs, and the proof of how far it can be from the best")
    one.add_argument("--schedule", default="auto", help="auto, a schedule's name or a CSV file, one line a rank (default auto)")
    one.add_argument("--svg", type=Path, help="a file for the picture")
    one.add_argument("--csv", type=Path, help="a file for the order, in torch's text")
    _add_costs(one)
    one.set_defaults(run=_simulate)
    many = verbs.add_parser("compare", help="print a table of all schedules on the same costs")
    _add_costs(many)
    many.set_defaults(run=_compare)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    seconds = "seconds, one number or one a stage with commas"
    add("--stages", type=int, default=8, help="stages and ranks, D (default %(default)s)")
    add("--microbatches", type=int, default=16, help="micro-batches of a step, N (default %(default)s)")
    add("--forward", type=_numbers, default=(1.0,), metavar="F", help=f"forward of a stage: {seconds} (default 1)")
    add("--input-grad", type=_numbers, default=(1.0,), metavar="I", help=f"input gradient: {seconds} (default 1)")
    add("--weight-grad", type=_numbers, default=(1.0,), metavar="W", help=f"weight gradient: {seconds} (default 1)")
    add("--latency", type=float, default=0.0, help="seconds of a message to the next stage (default 0)")
    add("--split-cost", type=float, default=0.0, help="what splitting a backward adds to it, 0.05 for 5 %% (default 0)")
    add("--peak", type=float, help="most activations a rank holds, in micro-batches of 1/D of the model (default: no cap)")
    add("--copies", type=int, default=2, help="copies of the weights that auto may use (default %(default)s)")
    add("--chunks", type=int, default=2, help="stages a rank holds of a pipe that auto may use: 1, or 2 for V shapes (default 2)")
    add("--shape", action="append", default=[], help="a shape that auto may use, for instance bidirectional; repeat for more")
    add("--no-split", action="store_true", help="auto keeps every backward whole")
    add("--search", choices=("default", "thorough"), default="default", help="a second, or half a minute kept on disk")
    add("--seconds", type=float, help="the search's budget in seconds of one core, instead of the level's")
    add("--seed", type=int, default=0, help="of the search (default 0)")
    add("--exchange", type=float, default=0.0, help="seconds in which a mirror's gradients cross to the owner (default 0)")
    add("--json", action="store_true", help="print one JSON object")


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, nor numbers with commas between them") from None


def _costs(args: argparse.Namespace, stages: int) -> Costs:
    """The costs of so many stages; numbers given for D stages are divided where a rank holds several chunks."""
    if args.stages < 1:
        raise ScheduleError(f"--stages must be at least 1, got {args.stages}")
    given = {"--forward": args.forward, "--input-grad": args.input_grad, "--weight-grad": args.weight_grad}
    for option, numbers in given.items():
        if len(numbers) not in (1, args.stages):
            raise ScheduleError(f"{option} has {len(numbers)} numbers; give one, or one for each of the {args.stages} stages")
    forward, first, second = (numbers * args.stages if len(numbers) == 1 else numbers for numbers in given.values())
    costs = Costs(forward=forward, input_grad=first, weight_grad=second, latency=args.latency)
    if args.split_cost:
        costs = costs.with_split_price(args.split_cost)
    if stages % args.stages:
        raise ScheduleError(f"the order has {stages} stages, no multiple of --stages {args.stages}")
    return costs.refined(stages // args.stages)


def _row(args: argparse.Namespace, name: str) -> _Row:
    """Makes one schedule and measures it in the model."""
    begin = time.perf_counter()
    if name == "auto":
        limits = Limits(peak=args.peak, copies=args.copies, chunks=args.chunks, split=not args.no_split, shapes=tuple(args.shape))
        costs = _costs(args, args.stages)
        found = auto(args.stages, args.microbatches, costs, limits, search=args.search, seconds=args.seconds, seed=args.seed)
        seconds = time.perf_counter() - begin
        return _Row(found.order, found.costs, found.certificate, seconds, found.shape, found.any_shape.seconds)
    known = name.lower() in schedules()
    order = make_order(name, args.stages, args.microbatches) if known else _read(name)
    seconds = time.perf_counter() - begin
    costs = _costs(args, order.placement.num_stages)
    return _Row(order, costs, certify(order, costs), seconds)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _read(name: str) -> Order:
    path = Path(name)
    if not path.is_file():
        raise ScheduleError(f"{name!r} is neither a schedule ({', '.join(schedules())}, auto) nor a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read {name}: {error}") from None
    order = read_order(text, path.name)
    check(order if order.is_lowered else lower(order))
    return order


def _simulate(args: argparse.Namespace) -> int:
    row = _row(args, args.schedule)
    found = row.as_dict()
    if args.exchange:
        found["step_with_exchange"] = _exchanged(row, args.exchange)
    if args.svg is not None:
        from fxchimera.view.svg import gantt

        _write(args.svg, gantt(simulate(row.order, row.costs)))
    if args.csv is not None:
        _write(args.csv, row.order.to_csv())
    if args.json:
        _say(json.dumps(found))
        return 0
    _say(str(row.certificate))
    if row.shape:
        _say(
            f"shape {row.shape}, found in {row.seconds:.2f} s; no order of any shape within these limits takes less than "
            f"{row.any_shape:.6g} s"
        )
    if args.exchange:
        _say(f"with the exchange between the copies of the weights the step takes {found['step_with_exchange']:.6g} s")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"cannot write {path}: {error.strerror}") from None


def _exchanged(row: _Row, seconds: float) -> float:
    """Makespan of the lowered order with the mirrors' gradients going to their owners, beside the computations."""
    if not 0 < seconds < math.inf:
        raise ScheduleError(f"--exchange must be finite and not negative, got {seconds}")
    place = row.order.placement
    edges = []
    for stage in range(place.num_stages):
        owner = place.pipes[0][stage]
        mirrors = sorted({ranks[stage] for ranks in place.pipes} - {owner})
        edges += [SyncEdge(stage, mirror, owner, 1) for mirror in mirrors]
    costs = dataclasses.replace(row.costs, sync=tuple(edges), sync_bytes_per_second=1 / seconds)
    return simulate(lower(row.order, costs, sync=edges), costs).makespan


def _compare(args: argparse.Namespace) -> int:
    rows = []
    for name in [*schedules(), "auto"]:
        try:
            rows.append(_row(args, name))
        except ScheduleError:
            if name == "auto":
                raise
    rows.sort(key=lambda row: row.certificate.makespan)
    if args.json:
        _say(json.dumps({"schedules": [row.as_dict() for row in rows]}))
        return 0
    _say(f"D={args.stages}, N={args.microbatches}; seconds; bubbles with a barrier; * holds more than --peak")
    _say(f"{'schedule':22}{'makespan':>10}{'bubble':>9}{'%':>7}{'span':>8}{'bound':>10}{'gap %':>7}{'peak':>6}  copies splits")
    for row in rows:
        one = row.certificate
        peak = max(one.peak_activations)
        over = "*" if args.peak is not None and peak > args.peak else " "
        _say(
            f"{one.schedule:22}{one.makespan:10.4g}{one.bubble:9.4g}{100 * one.bubble / one.makespan:7.1f}{one.span_bubble:8.4g}"
            f"{one.lower_bound:10.4g}{100 * one.gap:7.1f}{peak:6.3g}{over}{one.weight_copies:7d}{one.splits:7d}"
        )
    return 0
