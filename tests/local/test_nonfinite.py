"""A step whose loss is nan or infinite: refused, skipped or counted, with nothing half done."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from tests.local.toys import WIDTH, data, seeded
from tests.local.wrapped import step, wrap
from tests.models import Example
from tests.parity import assert_bitwise, gradients_of

N = 4


class Block(nn.Module):
    """A layer with batch norm, whose statistics a bad batch would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def example() -> Example:
    x, target = data(4 * N, WIDTH)
    return Example(seeded(lambda: nn.Sequential(*(Block() for _ in range(4)))), (x,), {}, target, F.mse_loss)


def spoiled(good: Example, *microbatches: int, value: float = math.nan) -> Example:
    """The same with a bad number in the target of some micro-batches."""
    target = good.target.clone()
    for microbatch in microbatches:
        target[4 * microbatch] = value
    return good._replace(target=target)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("stages", "schedule"), [(1, "gpipe"), (2, "zbv"), (4, "chimera"), (4, "auto")])
def test_by_default_it_is_an_error_that_names_the_micro_batches(stages: int, schedule: str) -> None:
    good = example()
    with wrap(good, stages, N, schedule) as pipe:
        step(pipe, good)
        before = gradients_of(good.model)
        directions = [pipe.plan.order.placement.pipe_name(pipe.plan.order.placement.pipe_of[m]) for m in (1, 3)]
        wanted = (
            rf"step 1 is nan, in micro-batch 1 \({directions[0]}\) \(nan\), micro-batch 3 \({directions[1]}\) \(nan\); .*as before"
        )
        with pytest.raises(fxchimera.NonFiniteLossError, match=wanted):
            step(pipe, spoiled(good, 1, 3))
        after = gradients_of(good.model)
        assert all(torch.equal(after[name], gradient) for name, gradient in before.items())
        with pytest.raises(fxchimera.NonFiniteLossError, match=r"step 1 is inf, in micro-batch 0 \(down\) \(inf\)"):
            step(pipe, spoiled(good, 0, value=math.inf))
        assert step(pipe, good).loss.isfinite(), "the pipeline goes on"


@pytest.mark.parametrize(("stages", "schedule"), [(1, "gpipe"), (2, "zbv"), (4, "chimera"), (4, "1f1b")])
def test_a_skipped_step_leaves_no_trace(stages: int, schedule: str) -> None:
    """Gradients, statistics of batch norm and all that follows are those of training without it."""
    good, other = example(), example()
    with wrap(good, stages, N, schedule, nan="skip") as pipe, wrap(other, stages, N, schedule) as never:
        step(pipe, good), step(never, other)
        before = state(good.model)
        assert step(pipe, spoiled(good, 2)).loss.isnan()
        assert same(state(good.model), before)
        assert_bitwise(step(pipe, good), step(never, other))
        assert same(state(good.model), state(other.model))
        with pytest.raises(fxchimera.FxChimeraError, match="no_sync"), pipe.no_sync():
            pass


def test_an_ignored_one_counts() -> None:
    good = example()
    plain = copy.deepcopy(good.model)
    bad = spoiled(good, 2)
    with wrap(bad, 2, 1, "1f1b", nan="ignore") as pipe:
        assert step(pipe, bad).loss.isnan()
    loss = F.mse_loss(plain(*bad.args), bad.target)
    loss.backward()
    assert loss.isnan()
    for found, wanted in zip(good.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad.isnan(), wanted.grad.isnan())


def test_a_micro_batch_that_does_not_count_may_have_any_loss() -> None:
    """All its targets are left out, so its mean is nan; the batch's loss is not."""
    logits, target = torch.randn(8, 5, dtype=torch.float64), torch.randint(5, (8,))
    target[:2] = -100
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    case = Example(model, (logits,), {}, target, F.cross_entropy)
    with wrap(case, 2, 4, "1f1b", loss_weight=-100) as pipe:
        assert step(pipe, case).loss.isfinite()


def test_another_policy_is_refused() -> None:
    with pytest.raises(fxchimera.FxChimeraError, match=r"nan='warn'.*'raise', 'skip', 'ignore'"):
        wrap(example(), 2, N, nan="warn")
