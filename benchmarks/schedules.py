"""The schedule search against its bounds, the published schedules, torch's generated orders, and the figures asked for.

    python benchmarks/schedules.py                       about two minutes of one core
    python benchmarks/schedules.py --search thorough     about 40 minutes; orders are kept in the cache

Bubbles are with a barrier, in units of the forward of 1/D of the model.  Everything is computed, nothing is run.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from fxchimera.errors import ScheduleError
from fxchimera.schedule import (
    Costs,
    Limits,
    Order,
    Placement,
    auto,
    bidirectional,
    bidirectional_v,
    certify,
    interleaved,
    lower_bound,
    make_order,
    one_way,
    read_csv,
    v_shape,
)
from fxchimera.schedule.listing import listed
from fxchimera.schedule.portfolio import trials
from fxchimera.schedule.problem import Problem
from fxchimera.schedule.shop import makespan_of

Row = dict[str, object]
PEERS = ("1f1b", "zb-h1", "zbv", "dualpipe", "dualpipev", "chimera")
ASKED_LATENCY = {(0.05, 8): 4.3, (0.1, 8): 5.0, (0.2, 8): 6.6, (0.1, 9): 3.9, (0.2, 9): 5.2}
ASKED_PRICE = {  # costs, N, price, shape, peak -> bubble
    ("uneven", 16, 0.0, "bidirectional", 9): 3.7,
    ("uneven", 16, 0.05, "bidirectional", 9): 4.5,
    ("uneven", 16, 0.1, "bidirectional", 9): 5.5,
    ("uneven", 32, 0.0, "bidirectional", 9): 3.9,
    ("uneven", 32, 0.05, "bidirectional", 9): 4.6,
    ("uneven", 32, 0.1, "bidirectional", 9): 5.9,
    ("equal", 8, 0.05, "bidirectional", 8): 3.75,
    ("equal", 8, 0.1, "bidirectional", 8): 4.3,
    ("equal", 8, 0.05, "bidirectional-v", 8): 1.95,
    ("equal", 8, 0.1, "bidirectional-v", 8): 2.3,
    ("equal", 16, 0.05, "bidirectional", 8): 3.85,
    ("equal", 16, 0.1, "bidirectional", 8): 4.9,
    ("equal", 16, 0.05, "bidirectional-v", 8): 2.9,
    ("equal", 16, 0.1, "bidirectional-v", 8): 3.7,
    ("equal", 32, 0.05, "bidirectional-v", 8): 3.3,
    ("equal", 32, 0.1, "bidirectional-v", 8): 4.9,
}
PUBLISHED = [("chimera", 8, 12.0), ("zbv", 16, 3.5), ("v-half", 16, 8.5), ("dualpipe", 16, 3.0), ("dualpipev", 16, 3.5)]
PUBLISHED += [("zb-h1", 16, 7.0), ("interleaved-1f1b", 16, 10.5), ("1f1b", 16, 21.0), ("gpipe", 16, 21.0)]


def stages(depth: int, kind: str = "uneven", latency: float = 0.0) -> Costs:
    """F 1, I 1.2, W 0.8 on every stage, or all 1."""
    first, second = (1.2, 0.8) if kind == "uneven" else (1.0, 1.0)
    return Costs(forward=(1.0,) * depth, input_grad=(first,) * depth, weight_grad=(second,) * depth, latency=latency)


def free() -> Iterator[Row]:
    """F = I = W = 1, no latency, peak D: list rules alone, the bound, and how long they took."""
    for depth in (2, 4, 6, 8, 12, 16):
        for number in (depth, depth + 1, 2 * depth, 3 * depth - 1, 4 * depth):
            for name, make, chunks in (("bidirectional", bidirectional, 1), ("bidirectional-v", bidirectional_v, 2)):
                problem = Problem.of(make(depth, number), Costs.uniform(depth).refined(chunks), peak=depth)
                bound, begin, best, tried = lower_bound(problem).seconds, time.process_time(), float("inf"), 0
                for trial in itertools.islice(trials(problem, 0), 24):
                    best = min(best, makespan_of(problem, listed(trial.shown(problem), trial.rule)[0]))
                    tried += 1
                    if best <= bound + 1e-9:
                        break
                taken = 1000 * (time.process_time() - begin)
                row: Row = {"shape": name, "D": depth, "N": number, "asked": ((depth + 1) // 2 - 1) / chunks}
                yield row | {"rules": best - 3 * number, "tried": tried, "ms": round(taken, 1)}


def latency(search: str) -> Iterator[Row]:
    """D=8, F 1, I 1.2, W 0.8: the search with two copies, one chunk; then with any shape; then the published ones."""
    for (hop, peak), number in itertools.product(((0.05, 8), (0.1, 8), (0.2, 8), (0.05, 9), (0.1, 9), (0.2, 9)), (8, 16, 32)):
        costs = stages(8, latency=hop)
        both = auto(8, number, costs, Limits(peak=peak, shapes=("bidirectional",)), search=search)
        best = auto(8, number, costs, Limits(peak=peak), search=search)
        asked = ASKED_LATENCY.get((hop, peak)) if peak == 8 or number >= 16 else None
        row: Row = {"latency": hop, "peak": peak, "N": number, "asked": asked, "bidirectional": both.certificate.bubble}
        row |= {"bound": both.certificate.lower_bound - 3 * number, "any": best.certificate.bubble, "shape": best.shape}
        for name in PEERS:
            try:
                order = make_order(name, 8, number)
            except ScheduleError:
                continue
            row[name] = certify(order, costs.refined(order.placement.chunks)).bubble
        yield row


def price(search: str) -> Iterator[Row]:
    """What splitting a backward costs, against DualPipe at its own peak."""
    for (kind, number, share, shape, peak), asked in ASKED_PRICE.items():
        costs = stages(8, kind, 0.1 if kind == "uneven" else 0.0).with_split_price(share)
        found = auto(8, number, costs, Limits(peak=peak, shapes=(shape,)), search=search)
        row: Row = {"costs": kind, "N": number, "price": share, "shape": shape, "peak": peak, "asked": asked}
        row |= {"reached": found.certificate.bubble, "splits": found.certificate.splits}
        if number >= 16:
            row["dualpipe@9"] = certify(make_order("dualpipe", 8, number), costs).bubble
        yield row


def published() -> Iterator[Row]:
    """Figures that the papers or their authors' code give, D=8, B=2F."""
    for name, number, wanted in PUBLISHED:
        order = make_order(name, 8, number)
        costs = Costs.uniform(8, 1.0, 2.0)
        found = certify(order, costs.refined(order.placement.chunks))
        yield {"schedule": name, "N": number, "published": wanted, "ours": found.bubble, "peak": max(found.peak_activations)}


def torchs() -> Iterator[Row]:
    """Torch's generated orders on the same costs (F 1, I 1.2, W 0.8), beside the search at the same peak and copies."""
    for (name, chunks), number, hop in itertools.product(TORCH.items(), (16, 32), (0.0, 0.1)):
        order = torch_order(name, 8, number, chunks)
        costs = stages(8, latency=hop)
        if order is None:
            continue
        theirs = certify(order, costs.refined(chunks))
        peak = max(theirs.peak_activations)
        for copies in (1, 2):
            ours = auto(8, number, costs, Limits(peak=peak, copies=copies))
            row: Row = {"torch": name, "N": number, "latency": hop, "peak": peak, "bubble": theirs.bubble, "copies": copies}
            yield row | {"ours": ours.certificate.bubble, "shape": ours.shape, "bound": ours.any_shape.seconds - 3 * number}


TORCH = {
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def torch_order(name: str, depth: int, number: int, chunks: int) -> Order | None:
    """The order that a class of torch.distributed.pipelining generates; None where its private names have gone."""
    try:
        from torch.distributed.pipelining import schedules

        kind: Any = getattr(schedules, name)
        fake = SimpleNamespace(
            pp_group_size=depth,
            n_local_stages=chunks,
            _n_microbatches=number,
            _num_stages=depth * chunks,
            num_stages=depth * chunks,
            microbatches_per_round=number // max(1, number // depth),
            number_of_rounds=max(1, number // depth),
            enable_zero_bubble="ZeroBubble" in name,
        )
        rows = [kind._calculate_single_rank_operations(SimpleNamespace(**vars(fake), rank=rank), rank) for rank in range(depth)]
    except (ImportError, AttributeError, TypeError):
        return None
    text = io.StringIO()
    csv.writer(text).writerows([["" if action is None else str(action) for action in row] for row in rows])
    place: Placement = interleaved(depth, chunks, number) if "Interleaved" in name else v_shape(depth, number)
    return read_csv(text.getvalue(), place if chunks > 1 else one_way(depth, number), name)


def show(title: str, rows: list[Row]) -> None:
    """A table with the columns of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[index]) for line in cells)) for index, name in enumerate(names)]
    print(f"\n{title}\n" + "  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Prints the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", choices=("default", "thorough"), default="default")
    parser.add_argument("--only", choices=("free", "latency", "price", "published", "torch"), action="append")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    tables = {
        "published": published,
        "free": free,
        "latency": lambda: latency(args.search),
        "price": lambda: price(args.search),
        "torch": torchs,
    }
    found = {name: list(make()) for name, make in tables.items() if not args.only or name in args.only}
    if args.json:
        print(json.dumps(found))
        return
    for name, rows in found.items():
        doc = {"latency": latency, "price": price}.get(name, tables[name]).__doc__ or name
        show(f"{name}: {doc.splitlines()[0]}", rows)


if __name__ == "__main__":
    main()
