"""Our balancer beside the partitioners of torchgpipe and DeepSpeed, on the same measured costs.

    python benchmarks/partitioners.py                  a dozen models of the zoo, D = 2, 4, 8; or --json

A layer is a piece of a recorded model that no cut can part, its cost what was measured for it, forward and backward.  A figure is
the heaviest stage over sum / D, so 1 is perfect.  The other partitioners are written anew here from what is published about them:

    block       torchgpipe.balance: Barany and Grolmusz, "Block partitions of sequences" (2015), elements scaled to at most 1
    probing     DeepSpeed partition_balanced: bisection of the bottleneck to a thousandth, each limit filled greedily
    parameters  the same on numbers of parameters in the place of costs, DeepSpeed's default method
    uniform     equal numbers of layers
    ours        the exact balancer: nothing can be less
    plan        fxchimera's plan without a schedule: up to 5 % more for fewer bytes, and every stage has parameters
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from forked import each

from fxchimera_passes.atoms import contract
from fxchimera_passes.balance import cut
from fxchimera_passes.capture import capture
from fxchimera_passes.cost import measured
from fxchimera_passes.liveness import sweep
from fxchimera_passes.stages import make_plan

MODELS = (
    "hf_gpt2", "hf_llama", "hf_bert", "hf_mt5", "hf_whisper", "hf_mixtral", "tv_resnet18", "tv_densenet121", "tv_vit",
    "timm_resnet10t", "diffusers_unet2d", "c_lstm_lm",
)  # fmt: skip
DEPTHS = (2, 4, 8)
_ACCURACY = 1e-3


def block(costs: Sequence[float], parts: int) -> list[int]:
    """Cuts by moving single elements from neighbour to neighbour towards the lightest block, until blocks differ by an element."""
    heaviest = max(costs)
    cuts = uniform(len(costs), parts)
    sums = list(accumulate(costs, initial=0.0))
    for _ in range(len(costs) * parts * parts):
        edges = [0, *cuts, len(costs)]
        loads = [sums[b] - sums[a] for a, b in pairwise(edges)]
        most = loads.index(max(loads))
        least = min(range(parts), key=lambda q: (loads[q], abs(q - most)))
        if loads[most] <= loads[least] + heaviest or most == least:
            break
        if most < least:
            cuts[least - 1] -= 1
        else:
            cuts[least] += 1
    return cuts


def probing(costs: Sequence[float], parts: int) -> list[int]:
    """Cuts of the least bottleneck found by bisection with greedy filling."""
    sums = list(accumulate(costs, initial=0.0))
    low, high, best = max(sums[-1] / parts, max(costs)), sums[-1], _filled(sums, parts, sums[-1])
    while high - low > _ACCURACY * low:
        middle = (low + high) / 2
        found = _filled(sums, parts, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    assert best is not None
    return best


def _filled(sums: Sequence[float], parts: int, limit: float) -> list[int] | None:
    cuts, begin = list[int](), 0
    for _ in range(parts):
        begin = bisect_right(sums, sums[begin] + limit, begin) - 1
        cuts.append(begin)
    return cuts[:-1] if begin == len(sums) - 1 else None


def uniform(count: int, parts: int) -> list[int]:
    """Cuts into equal numbers, the first ones one more."""
    size, more = divmod(count, parts)
    return [size * part + min(part, more) for part in range(1, parts)]


def heaviest(costs: Sequence[float], cuts: Sequence[int]) -> float:
    """The cost of the heaviest part, over that of an even one."""
    sums = list(accumulate(costs, initial=0.0))
    edges = (0, *cuts, len(costs))
    return max(sums[b] - sums[a] for a, b in pairwise(edges)) / (sums[-1] / (len(cuts) + 1))


def compare(zoo: Any, name: str) -> list[dict[str, object]]:
    """One row for each D: what every partitioner makes of one model."""
    from tests.zoo_models import samples_of

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, (sample, _) = samples_of(zoo, name, None)
    captured = capture(model, sample.args, sample.kwargs, num_stages=max(DEPTHS))
    costs = measured(captured, sample.args, sample.kwargs)
    atoms = contract(captured, sweep(captured), costs)
    rows: list[dict[str, object]] = []
    for depth in DEPTHS:
        if len(atoms.seconds) < depth:
            continue
        row: dict[str, object] = {"model": name, "D": depth, "layers": len(atoms.seconds)}
        plan = make_plan(captured, costs, depth)
        found = {
            "ours": cut(atoms.seconds, depth).positions,
            "block": block(atoms.seconds, depth),
            "probing": probing(atoms.seconds, depth),
            "parameters": probing([size + 1e-6 for size in atoms.parameter_bytes], depth),
            "uniform": uniform(len(atoms.seconds), depth),
        }
        row |= {method: heaviest(atoms.seconds, cuts) for method, cuts in found.items()}
        rows.append(row | {"plan": plan.bottleneck_seconds / (sum(atoms.seconds) / depth)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows as Markdown, and the medians."""
    methods = ("ours", "plan", "block", "probing", "parameters", "uniform")
    lines = ["| model | D | layers | " + " | ".join(methods) + " |", "|---" * (len(methods) + 3) + "|"]
    lines += [
        f"| {row['model']} | {row['D']} | {row['layers']} | " + " | ".join(f"{row[method]:.3f}" for method in methods) + " |"
        for row in rows
    ]
    for depth in DEPTHS:
        here = [row for row in rows if row["D"] == depth]
        if here:
            medians = [f"{statistics.median(row[method] for row in here):.3f}" for method in methods]
            lines.append(f"| median | {depth} | | " + " | ".join(medians) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code counts the rows in which another method beats ours."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.zoo_runner import _import_libraries, load_zoo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=MODELS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a model may take")
    options = parser.parse_args(arguments)
    zoo = load_zoo()
    _import_libraries()
    rows: list[dict[str, Any]] = []
    for name, found in each(lambda name: compare(zoo, name), options.names, limit=options.limit):
        if isinstance(found, str):
            sys.stderr.write(f"{name}: {found}\n")
        else:
            rows += found
    print(json.dumps(rows) if options.json else table(rows))
    others = ("block", "probing", "parameters", "uniform")
    return sum(min(row[method] for method in others) < row["ours"] * (1 - 1e-9) for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
