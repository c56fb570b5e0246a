"""``schedule="auto"``: the cut and the order planned together train the plain model, and the plan shows how good the order is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera.planner import joint
from fxchimera.planner.draft import Auto, arrange, draft
from fxchimera.planner.memory import holdings
from fxchimera.runtime.microbatch import ChunkSpecs, divide
from fxchimera.schedule import check, lower, make_order, simulate
from fxchimera.schedule.action import Kind
from tests.local.toys import WIDTH, Tanh, chain, data, seeded, wrapped
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS, Example
from tests.parity import TOLERANCE, assert_bitwise, assert_close, full_batch

SIZES = tuple(itertools.product((1, 2, 3, 4), (1, 2, 5, 8)))
NAMES = ("mlp", "tied", "nn_transformer")


@pytest.mark.parametrize(("ranks", "n"), SIZES)
def test_any_number_of_ranks_and_microbatches(ranks: int, n: int) -> None:
    """Uneven micro-batches in double precision: the bits of the reference, the full batch's gradients within 1e-12."""
    name = NAMES[(ranks + n) % 3]
    example = MODELS[name](dtype=torch.float64, batch=2 * n - 1)
    expected, plain = reference(example, ranks, n, "auto"), full_batch(MODELS[name](dtype=torch.float64, batch=2 * n - 1))
    with wrap(example, ranks, n, "auto") as pipe:
        found, plan = step(pipe, example), pipe.plan
    assert_bitwise(found, expected)
    assert_close(found, plain, TOLERANCE[torch.float64])
    assert (plan.schedule, plan.placement.num_ranks, plan.placement.n_microbatches) == ("auto", ranks, n)
    certificate = plan.certificate
    assert certificate.makespan == pytest.approx(simulate(plan.order, plan.costs).makespan, rel=1e-12)
    assert certificate.lower_bound <= certificate.makespan
    assert max(certificate.peak_activations) <= ranks


@pytest.mark.parametrize(("name", "ranks", "n"), [("gpt2", 2, 4), ("mlp", 4, 8), ("tied", 3, 6)])
def test_no_family_is_sooner(name: str, ranks: int, n: int) -> None:
    """Each family with the cut that is best for it, the exchange between its copies included; 1 % is given up for fewer copies."""
    first = divide_first(MODELS[name](batch=4 * n), n)
    model = MODELS[name]().model
    made = draft(model, *first, Auto(ranks, n, lambda captured: True))
    best = seconds_of(made.plan)
    assert made.plan.step_seconds == pytest.approx(best)
    for family in ("gpipe", "1f1b", "zb-h1", "zbv", "chimera")[: 5 if ranks % 2 == 0 else 4]:
        named = arrange(made.captured, made.costs, make_order(family, ranks, n), measures=made.plan.measures).plan
        assert best <= 1.01 * seconds_of(named), family


def divide_first(example: Example, n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the first micro-batch."""
    first = divide(example.args, example.kwargs, None, n, ChunkSpecs()).microbatches[0]
    return first.args, dict(first.kwargs)


def seconds_of(plan: Any) -> float:
    """Simulated seconds of a step with its exchange."""
    return simulate(lower(plan.order, plan.costs, sync=plan.costs.sync), plan.costs).makespan


@pytest.mark.parametrize("shape", ["v", "bidirectional-v"])
@pytest.mark.parametrize(("name", "ranks", "n"), [("tied", 2, 3), ("mlp", 4, 6)])
def test_two_stages_a_rank(name: str, ranks: int, n: int, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut for that shape alone: the reference's bits with dropout, the full batch's gradients without, the cap on activations."""
    monkeypatch.setattr(joint, "_SHAPES", frozenset({shape}))
    example = MODELS[name](dtype=torch.float64, batch=2 * n - 1, dropout=0.1)
    expected = reference(example, ranks, n, "auto")
    with wrap(example, ranks, n, "auto") as pipe:
        assert_bitwise(step(pipe, example), expected)
        plan = pipe.plan
    assert (plan.placement.chunks, len(plan.placement.pipes)) == (2, 1 if shape == "v" else 2)
    assert max(plan.certificate.peak_activations) <= ranks
    plain = MODELS[name](dtype=torch.float64, batch=2 * n - 1)
    with wrap(MODELS[name](dtype=torch.float64, batch=2 * n - 1), ranks, n, "auto") as pipe:
        found = step(pipe, plain._replace(model=pipe._model))
    assert_close(found, full_batch(plain), TOLERANCE[torch.float64])


def test_a_model_too_coarse_for_two_stages_a_rank_gets_one(recwarn: pytest.WarningsRecorder) -> None:
    """Four layers on four ranks cannot make a V of eight stages: no warning, as four stages are all that was asked for."""
    x, _ = data(8)
    with wrapped(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double(), x, num_stages=4, n_microbatches=4,
                 schedule="auto") as pipe:  # fmt: skip
        assert [len(stage.owned) for stage in pipe.plan.stages] == [2, 2, 2, 2]
    assert not [warning for warning in recwarn if issubclass(warning.category, fxchimera.CoarseCutWarning)]


def test_split_points_of_two_stages_a_rank() -> None:
    x, y = data(8)
    points = ["1", "2", "4"]
    with wrapped(chain(6), x, num_stages=2, n_microbatches=4, schedule="auto", split_points=points) as pipe:
        pipe.step(x, target=y)
        assert [len(stage.owned) for stage in pipe.plan.stages] == [2, 2, 4, 4]


@pytest.mark.parametrize(("name", "ranks", "n"), [("gpt2", 3, 5), ("resnet", 2, 4), ("tied", 4, 8)])
def test_dropout_has_the_masks_of_the_reference(name: str, ranks: int, n: int) -> None:
    example = MODELS[name](batch=2 * n, dropout=0.1)
    expected = [reference(example, ranks, n, "auto", step=number) for number in range(2)]
    with wrap(example, ranks, n, "auto") as pipe:
        for outcome in expected:
            assert_bitwise(step(pipe, example), outcome)
            example.model.zero_grad()
        assert pipe.verify(*example.args, target=example.target, **example.kwargs).bitwise


def test_two_wraps_make_one_plan() -> None:
    """Cut and order; the plan's own order, handed in, trains alike."""
    plans = []
    example = MODELS["gpt2"](batch=8)
    for _ in range(2):
        with wrap(example, 4, 8, "AUTO") as pipe:
            plans.append(pipe.plan)
            found = step(pipe, example)
        example.model.zero_grad()
    assert plans[0].order == plans[1].order
    assert repr(plans[0].cut) == repr(plans[1].cut)
    check(lower(plans[0].order))
    order: Any = plans[0].order
    assert_bitwise(found, reference(example, 4, 8, order))


def test_split_points_are_kept() -> None:
    x, y = data(8)
    with wrapped(chain(6), x, num_stages=3, n_microbatches=4, schedule="auto", split_points=["1", "5"]) as pipe:
        pipe.step(x, target=y)
        assert [len(stage.owned) for stage in pipe.plan.stages] == [2, 8, 2]


class Counting(nn.Module):
    """A layer that counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = Tanh(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x)
        return y


class Remembering(nn.Module):
    """A layer whose output depends on its last one, so that the micro-batches must come in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Tanh()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.state is not None:
            y = y + self.state.mean(0)
        self.state = y.detach()
        return y


class Stubborn(nn.Linear):
    """A layer that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stubborn:
        raise TypeError("there is only one of me")


@pytest.mark.parametrize("kind", [Counting, Remembering, Stubborn])
def test_a_model_that_allows_one_copy_gets_one(kind: type[nn.Module]) -> None:
    """What ``chimera`` refuses, ``auto`` trains: right as the plain loop over micro-batches is."""
    rows, n = 16, 8

    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(*(Tanh() for _ in range(5)), kind(), *(Tanh() for _ in range(2))))

    x, y = data(rows)
    plain, model = build(), build()
    losses = []
    for part, target in zip(x.split(rows // n), y.split(rows // n), strict=True):
        loss = F.mse_loss(plain(part), target) / n
        loss.backward()
        losses.append(loss.detach())
    with pytest.raises(fxchimera.FxChimeraError, match=r"1f1b"):
        wrapped(build(), x, num_stages=4, n_microbatches=n, schedule="chimera")
    with wrapped(model, x, num_stages=4, n_microbatches=n, schedule="auto") as pipe:
        loss = pipe.step(x, target=y)
        assert pipe.plan.certificate.weight_copies == 1
        assert "1 weight copies" in str(pipe.plan)
    torch.testing.assert_close(loss, torch.stack(losses).sum(), rtol=1e-12, atol=0.0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def busy() -> nn.Sequential:
    """Eight equal layers that compute much for what they send."""
    return seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 6)) for _ in range(8))))


def test_two_copies_and_split_backwards_where_they_help() -> None:
    """Eight equal layers on four ranks: no one-way order has a bubble below (D-1) F, the found one has.

    Between the layers there is little to send, and there are so many rows that what two copies exchange is little, too.
    """
    x, y = data(1600, 6)
    with wrapped(busy(), x, num_stages=4, n_microbatches=8, schedule="auto") as pipe:
        pipe.step(x, target=y)
        plan = pipe.plan
    assert plan.certificate.weight_copies == 2
    assert any(action.kind is Kind.W for _, action in plan.order)
    assert plan.certificate.bubble < 3 * sum(plan.costs.forward) / 4
    assert str(plan.certificate) in str(plan)
    assert "weight copies" in plan._repr_html_()
    assert "of parameters that mirrors get" in str(plan)
    with wrapped(busy(), data(16, 6)[0], num_stages=4, n_microbatches=8, schedule="auto") as pipe:  # two rows: it does not pay
        assert pipe.plan.certificate.weight_copies == 1


def test_a_cap_on_memory_is_kept() -> None:
    """A rank's cap below two copies leaves one; with room for activations of few micro-batches the order holds few."""
    layers, x = [nn.Linear(64, 64) for _ in range(8)], torch.randn(64, 64)
    layer = 4 * (64 * 64 + 64)
    options: dict[str, Any] = {"example_args": (x,), "num_stages": 4, "n_microbatches": 8, "schedule": "auto"}
    options["loss_fn"] = torch.sum
    held = 8 * layer + 12 * 4 * 8 * 64  # two layers with gradients and optimizer state, twelve tensors of a micro-batch
    with fxchimera.pipeline(nn.Sequential(*layers), memory=held, **options) as pipe:
        assert pipe.plan.certificate.weight_copies == 1
        assert max(need.total for need in pipe.plan.memory) <= held
        assert [rank.most() for rank in holdings(pipe.plan.order)] == [need_counts(need) for need in pipe.plan.memory]
        assert pipe.verify(x).bitwise
    with pytest.raises(fxchimera.PartitionError, match=r"and may have 100\.0 KiB"):
        fxchimera.pipeline(nn.Sequential(*layers), memory=100 * 1024, **options)
    with wrapped(busy(), data(1600, 6)[0], num_stages=4, n_microbatches=8, schedule="auto", memory="1 GiB") as pipe:
        assert pipe.plan.certificate.weight_copies == 2


def need_counts(need: Any) -> tuple[int, ...]:
    return tuple(count for _, _, count in need.in_flight)


@pytest.mark.parametrize(("ranks", "n", "message"), [(0, 2, "num_stages must be at least 1"), (2, 0, "n_microbatches must be")])
def test_mistakes(ranks: int, n: int, message: str) -> None:
    with pytest.raises(fxchimera.ScheduleError, match=message):
        wrapped(chain(2), data(4)[0], num_stages=ranks, n_microbatches=n, schedule="auto")


@pytest.mark.parametrize("name", ["gpipe", "chimera", "zbv"])
def test_named_schedules_have_certificates(name: str) -> None:
    x, y = data(8)
    with wrapped(chain(8), x, num_stages=2, n_microbatches=4, schedule=name) as pipe:
        pipe.step(x, target=y)
        plan = pipe.plan
    assert plan.certificate.schedule == name
    assert plan.certificate.makespan == pytest.approx(simulate(plan.order, plan.costs).makespan, rel=1e-12)
    assert plan.certificate.weight_copies == (2 if name == "chimera" else 1)
    work = [stage.cost_seconds for stage in plan.stages]
    busiest = {"gpipe": max(work), "chimera": sum(work) / 2, "zbv": max(work[0] + work[-1], sum(work[1:-1]))}[name]
    assert plan.excess == pytest.approx(2 * busiest / sum(work) - 1)
