"""Every family trains the plain model: whole backwards, and backwards split in input and weight gradients."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch

import fxchimera
from fxchimera.planner.ascending import ascending
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.auto import auto
from fxchimera.schedule.families import make_order, schedules
from fxchimera.schedule.limits import Limits
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs
from tests.local.divided import waiting_for_w
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS
from tests.parity import assert_bitwise

RANKS, MICROBATCHES = 4, 8
SPLIT = ("zb-h1", "zbv", "v-half", "dualpipe", "dualpipev", "auto", "auto, one copy")
TRAINED = ("mlp", "gpt2", "tied", "resnet")
DTYPES = (torch.float32, torch.float64)

Cell = tuple[str, str, int, int, torch.dtype]


def splits(order: Order) -> bool:
    return any(action.kind is Kind.W for _, action in order)


def make(family: str, ranks: int, n: int) -> Order:
    """A family's order; "auto" searches for a moment, with stages of different costs."""
    if not family.startswith("auto"):
        return make_order(family, ranks, n)
    one = tuple(1.0 + 0.1 * (stage % 3) for stage in range(ranks))
    costs = Costs(forward=one, input_grad=one, weight_grad=one, backward=tuple(1.9 * seconds for seconds in one))
    found = auto(ranks, n, costs, Limits(copies=1 if "one" in family else 2), seconds=0.05).order
    return ascending(found)  # as the planner does: batch norm counts the micro-batches in turn


def fits(family: str, ranks: int, n: int) -> bool:
    return (family not in ("dualpipe", "dualpipev") or n >= 2 * ranks) and (family != "dualpipe" or ranks % 2 == 0)


def cells() -> list[Any]:
    """All combinations; two models of each family, with D, N and type rotating, run by default."""
    wanted = {}
    for (i, family), (k, name) in itertools.product(enumerate(SPLIT), enumerate(TRAINED)):
        sizes = [(d, n) for d in (2, 3, 4) for n in (2, 4, 8) if fits(family, d, n)]
        for j, ((d, n), dtype) in enumerate(itertools.product(sizes, DTYPES)):
            wanted[family, name, d, n, dtype] = (i + k) % 2 == 0 and j == (5 * i + 3 * k) % (2 * len(sizes))
    return [pytest.param(*cell, marks=() if chosen else pytest.mark.matrix) for cell, chosen in wanted.items()]


@pytest.mark.parametrize("name", sorted(schedules()))
def test_every_family_trains_the_plain_model(name: str) -> None:
    """A tied model, uneven micro-batches: the full batch's gradients within 1e-12, two and more replicas or stages a rank."""
    example = MODELS["tied"](dtype=torch.float64, batch=2 * MICROBATCHES + 1)
    plain = copy.deepcopy(example.model)
    example.loss(plain(*example.args, **example.kwargs)).backward()
    with fxchimera.pipeline(
        example.model,
        example_args=example.args,
        example_kwargs=example.kwargs,
        loss_fn=example.loss_fn,
        num_stages=RANKS,
        n_microbatches=MICROBATCHES,
        schedule=name,
    ) as pipe:
        pipe.step(*example.args, target=example.target, **example.kwargs)
        verification = pipe.verify(*example.args, target=example.target, **example.kwargs)
    assert verification.bitwise
    for ours, theirs in zip(example.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("family", "name", "ranks", "n", "dtype"), cells())
def test_split_backwards_have_the_bits_of_the_reference(family: str, name: str, ranks: int, n: int, dtype: torch.dtype) -> None:
    """Two steps, dropout, micro-batches of one and of two rows (two recordings); the second step adds to the first's gradients."""
    order: Any = make(family, ranks, n)
    assert splits(order) or family == "auto"  # with two copies and few micro-batches the search may do without
    example = MODELS[name](dtype=dtype, batch=2 * n - 1, dropout=0.1)
    expected = [reference(example, ranks, n, order, step=number) for number in range(2)]
    with wrap(example, ranks, n, order) as pipe:
        first = step(pipe, example)
        example.model.zero_grad()
        second = step(pipe, example)
    assert_bitwise(first, expected[0])
    assert_bitwise(second, expected[1])


def shuffled(ranks: int, n: int, seed: int) -> Order:
    """An order drawn at random: backwards whole or in two parts, micro-batches and their weight parts in any order."""
    generator = random.Random(seed)
    needs: dict[tuple[Kind, int, int], list[tuple[Kind, int, int]]] = {}
    for stage, m in itertools.product(reversed(range(ranks)), range(n)):
        whole = generator.random() < 0.3
        needs[Kind.F, stage, m] = [(Kind.F, stage - 1, m)] if stage else []
        back = Kind.B if whole else Kind.I
        later = [(kind, stage + 1, m) for kind in (Kind.B, Kind.I) if (kind, stage + 1, m) in needs]
        needs[back, stage, m] = [(Kind.F, stage, m), *later]
        if not whole:
            needs[Kind.W, stage, m] = [(Kind.I, stage, m)]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[tuple[Kind, int, int]] = set()
    while ready := [key for key, before in needs.items() if key not in done and done.issuperset(before)]:
        kind, stage, m = chosen = generator.choice(ready)
        done.add(chosen)
        lists[stage].append(Action(stage, kind, m))
    return Order("shuffled", make_order("1f1b", ranks, n).placement, tuple(map(tuple, lists)))


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_the_parts_has_the_same_bits(seed: int) -> None:
    """Sums are by micro-batch, ascending, whatever came first: with 6 micro-batches of two recordings, on 3 ranks."""
    name, order = ("mlp", "gpt2", "tied")[seed % 3], shuffled(3, 6, seed)  # batch norm needs forwards in turn
    example = MODELS[name](batch=11, dropout=0.1)
    expected = [reference(example, 3, 6, order, step=number) for number in range(2)]
    with wrap(example, 3, 6, order) as pipe:
        for outcome in expected:
            assert_bitwise(step(pipe, example), outcome)
            example.model.zero_grad()


@pytest.mark.parametrize("family", ["zbv", "dualpipe"])
def test_weight_gradients_really_wait(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters of a chain of linears get their gradient in W, of each micro-batch, in the first step as in the second."""
    waiting = waiting_for_w(monkeypatch)
    example = MODELS["mlp"](batch=16)
    order: Any = make_order(family, 2, 8)
    sizes = [0] * len(order.placement.pipes[0])
    with wrap(example, 2, 8, order) as pipe:
        for stage in pipe.plan.stages:
            sizes[stage.index] = len(stage.parameters)
        step(pipe, example)
        first = sorted(map(len, waiting))
        waiting.clear()
        step(pipe, example)
    assert first == sorted(map(len, waiting)) == sorted(sizes[action.stage] for _, action in order if action.kind is Kind.W)
