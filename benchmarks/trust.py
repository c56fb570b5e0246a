"""The goals of reliability in figures: parity, proofs, failures and leaks, measured here, each beside its bar.

    python -m benchmarks.trust [--trials 2] [--cycles 100] [--endings 1] [--mutants 7000] [--walks 100] [--junit FILE] [--json]

It needs the tests beside it, whose models, faults and processes it uses.  Times are of this machine as it is: a busy one is slow to
notice anything.  A row whose figure is above its bar says so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.goal import Row
from benchmarks.trust_runs import endings, misuse, mutants, repeated, suite, walks
from fxchimera.schedule import check, lower, make_order
from tests.cycles import cycles
from tests.faults import OF_PROCESSES, faults
from tests.killing import can_trace
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS
from tests.parity import Outcome, full_batch
from tests.process import failing
from tests.process.culprits import SAID, SECONDS
from tests.process.pool import Pool
from tests.torn import Torn, damages

_DEPTHS, _MOST = (2, 4, 6, 8, 16), 64
_STAGES, _N = 4, 4


def parity() -> Iterator[Row]:
    """G1b and G1c: against the reference of the same association, and against the plain full batch."""
    bits, relative = 0, {torch.float64: 0.0, torch.float32: 0.0}
    names = [name for name in MODELS if name != "resnet"]  # batch norm has no full-batch witness
    for dtype in relative:
        for name in names:
            example = MODELS[name](dtype=dtype, batch=8)
            with wrap(example, _STAGES, _N, "chimera") as pipe:
                found = step(pipe, example)
            example.model.zero_grad()
            wanted = reference(example, _STAGES, _N, "chimera")
            bits += not torch.equal(found.loss, wanted.loss) or any(
                g is not None and not torch.equal(g, wanted.gradients[key]) for key, g in found.gradients.items()
            )
            relative[dtype] = max(relative[dtype], _distance(found, full_batch(example)))
    yield Row("G1b", "models not equal to the reference to the last bit, chimera, D=4", 2 * len(names), bits, 0, "models")
    yield Row("G1c", "gradients against the full batch, float32", len(names), relative[torch.float32], 1e-6, "relative")
    yield Row("G1c", "gradients against the full batch, float64", len(names), relative[torch.float64], 1e-12, "relative")


def _distance(found: Outcome, wanted: Outcome) -> float:
    whole = sum(float(g.double().square().sum()) for g in wanted.gradients.values() if g is not None) ** 0.5
    errors = [0.0]
    for name, gradient in wanted.gradients.items():
        other = found.gradients[name]
        if gradient is not None and other is not None:
            norm = max(float(gradient.double().norm()), 1e-3 * whole)
            errors.append(float((other.double() - gradient.double()).norm()) / norm)
    return max(errors)


def proofs() -> Iterator[Row]:
    """G2a: every order of the paper's family in the strictest mode; it raises if one is not proven."""
    count, longest = 0, 0.0
    for depth in _DEPTHS:
        for n in range(1, _MOST + 1):
            order = lower(make_order("chimera", depth, n))
            began = time.process_time()
            check(order)
            count, longest = count + 1, max(longest, time.process_time() - began)
    yield Row("G2a", f"orders proven, D in {_DEPTHS}, N 1..{_MOST}: the longest proof", count, longest, 1.0, "s of CPU")


def failures(pool: Pool, trials: int) -> Iterator[Row]:
    """G3: until the last survivor has raised, and how many did not name the culprit."""
    wrong, asked, closing = 0, 0, 0.0
    for kind in SAID:
        slowest = 0.0
        chosen = [faults(kind, _STAGES)[trial % 6] for trial in range(trials)]
        for fault in chosen:
            if kind in OF_PROCESSES:
                answers = pool.survivors(_STAGES, fault.victim, failing.meet, fault, _STAGES, "chimera")
            else:
                answers = dict(enumerate(pool.run(_STAGES, failing.meet, fault, _STAGES, "chimera", spoils=True)))
            for rank, (_, text, seconds, _, _, close) in answers.items():
                slowest, closing, asked = max(slowest, seconds), max(closing, close), asked + 1
                itself = rank == fault.victim and kind in ("interrupted", "exit")  # raises what the user raised
                wrong += not (itself or text.startswith(f"rank {fault.victim} failed: "))
        yield Row("G3", f"{kind}: until the last survivor raises", len(chosen), slowest, SECONDS[kind], "s")
    yield Row("G3", "survivors that do not name the culprit", asked, wrong, 0, "ranks")
    yield Row("G4", "close() after a failure", asked, closing, 5.0, "s")


def leaks(pool: Pool, count: int) -> Iterator[Row]:
    """G6: what is left after making and closing pipelines, as threads and as processes."""
    left = {
        "threads": cycles(count, _STAGES, "chimera"),
        "processes": max(pool.run(2, cycles, count, 2, "chimera", limit=60.0 + 6 * count), key=lambda one: one.resident),
    }
    for kind, found in left.items():
        yield Row("G6", f"{kind}: threads and open files more than before", count, len(found.threads) + len(found.files), 0, "")
        yield Row("G6", f"{kind}: resident memory more than before", count, found.resident / 1e6, 5.0, "MB")


def saves(kills: int) -> Iterator[Row]:
    """G7: a save over an earlier one, killed before every system call and at random times; then one file damaged at a time."""
    with tempfile.TemporaryDirectory() as folder:
        torn = Torn(Path(folder))
        answers = torn.at_calls(range(torn.calls())) if can_trace() else []
        chosen = random.Random(0)
        answers += torn.at_times(chosen.uniform(0.0, 0.06) for _ in range(max(kills - len(answers), 0)))
        lost = sum(answer not in ("first", "second") for answer in answers)
        yield Row("G7", "killed saves after which not one whole save is loaded, bitwise", len(answers), lost, 0, "saves")
        damaged = damages(torn.second_folder, flips=kills, cuts=kills // 4)
        yield Row(
            "G7", "flipped bits and lost ends that are not refused at once", len(damaged), len(torn.accepted(damaged)), 0, "files"
        )
        torn.close()


def _parts(pool: Pool, args: argparse.Namespace) -> Iterator[Iterator[Row]]:
    parts = {
        "G1": (repeated(), parity()),
        "G2": (proofs(), mutants(args.mutants), walks(pool, args.walks)),
        "G3": (failures(pool, args.trials),),
        "G4": (endings(args.endings),),
        "G5": (misuse(pool),),
        "G6": (leaks(pool, args.cycles),),
        "G7": (saves(args.kills),),
        "G9": (suite(args.junit),) if args.junit else (),
    }
    for goal, some in parts.items():
        yield from some if not args.only or goal in args.only.split(",") else ()


def main() -> int:
    """Measure, print, and return how many bars were missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2, help="of each kind of failure")
    parser.add_argument("--cycles", type=int, default=100, help="of making and closing a pipeline")
    parser.add_argument("--kills", type=int, default=200, help="of saves")
    parser.add_argument("--endings", type=int, default=1, help="of each kind of training that is ended from outside")
    parser.add_argument("--mutants", type=int, default=7000, help="that fail, of proven orders")
    parser.add_argument("--walks", type=int, default=100, help="of random orders between processes")
    parser.add_argument("--junit", type=Path, help="what the default suite has written: nox -s tests -- --junitxml=FILE (G9)")
    parser.add_argument("--only", default="", help="goals, separated by commas, to be measured alone")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pool, rows = Pool(_STAGES), []
    try:
        for part in _parts(pool, args):
            for row in part:
                rows.append(row)
                if not args.json:
                    print(row, flush=True)
    finally:
        pool.stop()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    return sum(row.worst > row.bar for row in rows)


if __name__ == "__main__":
    sys.exit(main())
