"""Rows of trust.py from whole runs: training that is repeated, random orders, mutants, mistakes, and ends from outside."""

from __future__ import annotations

import random
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.goal import Row
from fxchimera.schedule import bidirectional, lower, one_way
from tests.ending import KINDS, Ended, end
from tests.local.wrapped import reference, step, wrap
from tests.misuse import MISUSE
from tests.models import MODELS, Example
from tests.parity import full_batch
from tests.process import messages
from tests.process.pool import Pool
from tests.pure import test_schedule_oracle as oracle
from tests.pure.random_orders import random_order

__all__ = ["endings", "misuse", "mutants", "repeated", "suite", "walks"]

_STEPS, _STAGES, _N = 20, 4, 4
_REPEATED = ("mlp", "gpt2", "tied")
_OURS = ("FxChimeraError", "BatchError", "PipelineError", "CaptureError")


def repeated() -> Iterator[Row]:
    """G1a and G1d: twenty steps, run again, run with random sleeps, and against plain loops."""
    again = jittered = bits = 0
    loss = weights = 0.0
    for name in _REPEATED:
        first = _trained(MODELS[name](batch=8, dropout=0.1))
        again += not _same(_trained(MODELS[name](batch=8, dropout=0.1)), first)
        jittered += not _same(_trained(_jittery(MODELS[name](batch=8, dropout=0.1))), first)
        bits += not _same(_trained(MODELS[name](batch=8)), _referred(MODELS[name](batch=8)))
        plain = _plain(MODELS[name](batch=8))
        loss = max(
            loss, max(abs(float(a - b)) / float(b) for a, b in zip(_trained(MODELS[name](batch=8))[0], plain[0], strict=True))
        )
        doubles = _trained(MODELS[name](batch=8, dtype=torch.float64)), _plain(MODELS[name](batch=8, dtype=torch.float64))
        weights = max(weights, max(float((a - b).norm() / b.norm()) for a, b in zip(doubles[0][1], doubles[1][1], strict=True)))
    count = len(_REPEATED)
    yield Row("G1a", f"models whose {_STEPS} steps differ when run again", count, again, 0, "models")
    yield Row("G1a", f"models whose {_STEPS} steps differ under sleeps of 0-5 ms", count, jittered, 0, "models")
    yield Row("G1d", f"models whose {_STEPS} steps differ from the reference's, to the last bit", count, bits, 0, "models")
    yield Row("G1d", f"losses of {_STEPS} steps against the full batch, float32", count, loss, 1e-4, "relative")
    yield Row("G1d", f"parameters after {_STEPS} steps against the full batch, float64", count, weights, 1e-9, "relative")


_Run = tuple[list[Tensor], list[Tensor]]  # losses, and parameters at the end


def _trained(example: Example) -> _Run:
    losses = []
    with wrap(example, _STAGES, _N, "chimera") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for _ in range(_STEPS):
            optimizer.zero_grad()
            losses.append(step(pipe, example).loss)
            optimizer.step()
    return losses, [parameter.detach() for parameter in example.model.parameters()]


def _referred(example: Example) -> _Run:
    """The same with the gradients of :func:`fxchimera.reference`."""
    optimizer, losses = torch.optim.AdamW(example.model.parameters()), []
    for _ in range(_STEPS):
        found = reference(example, _STAGES, _N, "chimera")
        losses.append(found.loss)
        for name, parameter in example.model.named_parameters():
            parameter.grad = found.gradients[name]
        optimizer.step()
    return losses, [parameter.detach() for parameter in example.model.parameters()]


def _plain(example: Example) -> _Run:
    optimizer, losses = torch.optim.AdamW(example.model.parameters()), []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        losses.append(full_batch(example).loss)
        optimizer.step()
    return losses, [parameter.detach() for parameter in example.model.parameters()]


def _jittery(example: Example) -> Example:
    chance = random.Random(0)
    for module in example.model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda *_: time.sleep(5e-3 * chance.random()))
    return example


def _same(one: _Run, other: _Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True))


def mutants(count: int) -> Iterator[Row]:
    """G2b: orders with one fault, refused if and only if an executor that knows nothing of the checker fails on them."""
    chance = random.Random(0)
    places = [one_way(4, 5), bidirectional(2, 4), bidirectional(4, 6), bidirectional(6, 6)]
    faulty = missed = alarms = 0
    while faulty < count:
        place = chance.choice(places)
        sync = oracle.random_edges(place, chance)
        order = lower(random_order(place, chance, split=chance.random() < 0.5), sync=sync)
        for _ in range(20):
            _, mutant = oracle.mutate(order, chance)
            fails = bool(oracle.Executor(mutant, sync, forward=mutant.is_forward_only).run(chance))
            refused = bool(oracle.refused(mutant, sync))
            faulty, missed, alarms = faulty + fails, missed + (fails and not refused), alarms + (refused and not fails)
    yield Row("G2b", "mutants of proven orders that fail and are not refused", faulty, missed, 0, "orders")
    yield Row("G2b", "mutants that are refused and do not fail", faulty, alarms, 0, "orders")


def walks(pool: Pool, count: int) -> Iterator[Row]:
    """G2c: random orders over the real transport, every message compared with what its receiver expects."""
    received = wrong = 0
    for ranks, seeds in ((2, range(count // 2)), (4, range(count // 2, count))):
        for found, bad in pool.run(ranks, messages.walk, ranks, seeds, limit=60.0 + len(seeds)):
            received, wrong = received + found, wrong + bad
    yield Row("G2c", f"wrong messages of {received} in random orders between processes", count, wrong, 0, "messages")


def endings(trials: int) -> Iterator[Row]:
    """G4: training on two ranks that is ended from outside, by torchrun and as threads."""
    found: list[Ended] = []
    for threads in (False, True):
        for kind in KINDS if not threads else ("ctrl-c",):
            ends = []
            for seed in range(trials):
                with tempfile.TemporaryDirectory() as folder:
                    ends.append(end(kind, 2, Path(folder), seed, threads=threads))
            what = f"{kind}{', threads' if threads else ''}: until the last rank is gone"
            yield Row("G4", what, trials, max(one.seconds for one in ends), 5.0, "s")
            found += ends
    left = sum(len(one.orphans) + sum(name.startswith("fxchimera-place") for name in one.files) for one in found)
    yield Row(
        "G4", "lines that the ranks print, beside torchrun's own", len(found), max(len(one.lines) for one in found), 30, "lines"
    )
    yield Row("G4", "processes and files left", len(found), left, 0, "")


def misuse(pool: Pool) -> Iterator[Row]:
    """G5: mistakes that set ranks apart; the processes are new for each, and must answer."""
    died = other = 0
    for function, arguments in MISUSE.values():
        try:
            answers = pool.run(2, function, *arguments, spoils=True)
            other += any(error not in _OURS for error, _, _ in answers)
        except pytest.fail.Exception as failure:
            died += "died with exit code" in str(failure)
            other += "died with exit code" not in str(failure)
    yield Row("G5", "mistakes of users by which a process dies", len(MISUSE), died, 0, "mistakes")
    yield Row("G5", "mistakes that are not an error of ours on every rank", len(MISUSE), other, 0, "mistakes")


def suite(report: Path) -> Iterator[Row]:
    """G9: the default suite's duration, from the file that ``nox -s tests -- --junitxml=FILE`` writes."""
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    count, bad = (sum(int(one.get(key, "0")) for one in suites) for key in ("tests", "failures"))
    yield Row("G9", "the default suite, two workers", count, sum(float(one.get("time", "0")) for one in suites), 540.0, "s")
    yield Row("G9", "tests of the default suite that fail", count, bad, 0, "tests")
