"""``pipe.profile()`` and ``pipeline(..., profile=True)``: right figures, a better cut, and a model that knows nothing of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera import FxChimeraError, PipelineError
from fxchimera.planner import draft as drafting
from fxchimera.schedule import simulate
from tests.local.toys import Tanh, chain, data, plain, seeded, wrapped
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS
from tests.parity import Outcome, assert_bitwise, assert_close, assert_same_tensors, gradients_of
from tests.sleeping import BACKWARD, FORWARD, slow_chain


def test_stages_take_at_least_their_sleep() -> None:
    """Factors 1, 3 and 2 in three stages: nobody is quicker, and they come in that order; splitting defers the linear layer."""
    model = seeded(lambda: slow_chain(0.0, 1.0, 0.0, 3.0, 2.0))
    x, y = data(4)
    with wrapped(model, x, num_stages=3, n_microbatches=2, schedule="1f1b", split_points=["2", "4"]) as pipe:
        analytic = pipe.plan
        profile = pipe.profile(x, target=y, rounds=3)
        plan = pipe.plan
        drawn = pipe.draw()
    assert len(profile.stages) == 3
    for times, factor in zip(profile.stages, (1.0, 3.0, 2.0), strict=True):
        assert times.forward >= FORWARD * factor
        assert times.split_forward >= FORWARD * factor
        assert times.backward >= BACKWARD * factor
        assert times.input_grad >= BACKWARD * factor
        assert 0.0 < times.weight_grad < times.input_grad
        assert times.backward > times.forward
    assert profile.stages[0].forward < profile.stages[2].forward < profile.stages[1].forward
    assert profile.measured >= 2 * (FORWARD + BACKWARD) * 3.0  # the middle rank's work alone
    assert profile.predicted >= 2 * (FORWARD + BACKWARD) * 3.0
    assert profile.ratio == profile.predicted / profile.measured
    assert [(stage.forward_seconds, stage.backward_seconds) for stage in plan.stages] == [
        (times.forward, times.backward) for times in profile.stages
    ]
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in analytic.stages]
    assert plan.costs.forward == tuple(times.forward for times in profile.stages)
    assert plan.certificate.makespan == pytest.approx(simulate(plan.order, plan.costs).makespan)
    predicted, measured = drawn.timelines
    assert (drawn.paired, predicted.makespan, measured.makespan) == (True, profile.predicted, profile.measured)


def test_links_and_the_table() -> None:
    x, y = data(4)
    with wrapped(chain(4), x, num_stages=4, n_microbatches=4, schedule="chimera") as pipe:
        profile = pipe.profile(x, target=y, rounds=2)
    assert [link.ranks for link in profile.links] == [(0, 1), (1, 2), (2, 3)]
    assert all(link.small > 0.0 and link.large > 0.0 for link in profile.links)
    assert profile.link.latency == max(link.small for link in profile.links)
    assert profile.link.bytes_per_second == min(link.bytes_per_second for link in profile.links)
    shown = str(profile)
    assert "predicted / measured" in shown
    assert "one at a time" in shown
    assert "threads of one process" in shown
    assert repr(profile) == shown
    page = profile._repr_html_()
    assert page.count("<tr>") == 5 + 4
    with pytest.raises(AttributeError):
        profile.measured = 1.0


class Stateful(nn.Module):
    """Everything that a forward may leave behind: a count, a cache, a written buffer, statistics; and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(6))
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        h = self.norm(self.linear(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.drop(h)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Compare everything of a model, and the random generators, before and after."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    state, gradients = copy.deepcopy(model.state_dict()), gradients_of(model)
    objects = {name: p.grad for name, p in model.named_parameters()}
    attributes = [copy.deepcopy((m.calls, m.seen)) for m in model.modules() if isinstance(m, Stateful)]
    yield
    assert_same_tensors(model.state_dict(), state)
    assert_same_tensors(gradients_of(model), gradients)
    assert all(p.grad is objects[name] for name, p in model.named_parameters())
    assert [(m.calls, m.seen) for m in model.modules() if isinstance(m, Stateful)] == attributes
    numbers = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    assert numbers == (random.random(), float(np.random.rand()), float(torch.rand(())))


def test_the_model_is_as_before() -> None:
    """Gradients there already, hooks on parameters, and the step after it is the one that would have been without."""
    build = lambda: nn.Sequential(Stateful(), Tanh(), Stateful(), Tanh())  # noqa: E731
    x, y = data(8)
    outcomes = []
    for profiled in (False, True):
        model, called = seeded(build), []
        with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="zb-h1", seed=5) as pipe:
            pipe.step(x, target=y)
            model[1].linear.weight.register_hook(called.append)
            if profiled:
                with untouched(model):
                    pipe.profile(x, target=y, rounds=2)
                assert called == []
            loss = pipe.step(x, target=y)
            assert len(called) == 1
        outcomes.append(({"loss": loss, **gradients_of(model)}, dict(model.state_dict()), model[0].calls))
    (found, state, calls), (other, other_state, other_calls) = outcomes
    assert_same_tensors(found, other)
    assert_same_tensors(state, other_state)
    assert calls == other_calls


@pytest.mark.parametrize(
    ("name", "stages", "n", "schedule"), [("gpt2", 2, 2, "chimera"), ("tied", 2, 3, "auto"), ("resnet", 2, 2, "gpipe")]
)
def test_real_models_train_as_before(name: str, stages: int, n: int, schedule: str) -> None:
    """Dropout's masks, too, are those of the reference's first step."""
    example = MODELS[name](batch=2 * n, dropout=0.1)
    expected = reference(example, stages, n, schedule)
    with wrap(example, stages, n, schedule) as pipe:
        pipe.profile(*example.args, target=example.target, rounds=1, **example.kwargs)
        assert_bitwise(step(pipe, example), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_slow_layer_gets_a_stage_of_its_own(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula takes all sleeps for equal; the measured plan puts the long one on its own, from one recording of the model."""
    build = lambda: slow_chain(0.2, 4.0, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2)  # noqa: E731
    x, y = data(8)
    recorded: list[int] = []
    capture = drafting.capture
    monkeypatch.setattr(drafting, "capture", lambda *args, **options: recorded.append(1) or capture(*args, **options))
    with wrapped(seeded(build), x, num_stages=4, n_microbatches=4, schedule="1f1b") as pipe:
        assert len(sleeps(pipe)) > 1
    expected, model = plain(seeded(build), lambda one: F.mse_loss(one(x), y)), seeded(build)
    recorded.clear()
    with untouched(model):
        pipe = wrapped(model, x, num_stages=4, n_microbatches=4, schedule=schedule, profile=True)
    with pipe:
        others, stages = sleeps(pipe), pipe.plan.stages
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
        assert pipe._preparation._programs.recordings == 0
    assert recorded == [1]
    assert others == ["apply_sleep_1"]
    assert sum(stage.forward_seconds for stage in stages) >= 5.4 * FORWARD  # shared out anew, and together what was measured
    assert sum(stage.backward_seconds for stage in stages) >= 5.4 * BACKWARD
    assert_close(found, expected, 1e-12)


def sleeps(pipe: Any) -> list[str]:
    """All sleeps in the stage of the second one."""
    slow = next(stage for stage in pipe.plan.stages if "apply_sleep_1" in stage.nodes)
    return [name for name in slow.nodes if name.startswith("apply_sleep")]


def test_a_plan_made_from_a_measurement_is_in_its_seconds() -> None:
    """The model's own loss is part of the last stage; what a plan says of the machine is measured."""
    example = MODELS["gpt2"](batch=4)
    with wrap(example, 2, 2, "auto", profile=True) as pipe:
        plan = pipe.plan
        found = step(pipe, example)
    assert_bitwise(found, reference(example, 2, 2, plan.order))
    assert plan.measures.link.latency > 0.0
    assert plan.certificate.makespan == pytest.approx(simulate(plan.order, plan.costs).makespan)


def test_what_cannot_be_measured() -> None:
    x, y = data(8)
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b") as pipe:
        with pytest.raises(FxChimeraError, match=r"rounds, at least 1, .* passed \[0\]"):
            pipe.profile(x, target=y, rounds=0)
        with torch.no_grad(), pytest.raises(FxChimeraError, match=r"profile\(\) runs backwards"):
            pipe.profile(x, target=y)
        with pipe.no_sync():
            with pytest.raises(FxChimeraError, match=r"profile\(\) cannot run under no_sync\(\)"):
                pipe.profile(x, target=y)
            pipe.step(x, target=y)
        with pytest.raises(FxChimeraError, match=r"profile\(\) cannot run under no_sync\(\)"):
            pipe.profile(x, target=y)
        pipe.step(x, target=y)
        before = pipe.plan
        with pytest.raises(fxchimera.BatchError):
            pipe.profile(x[:2], target=y[:2])
        assert pipe.plan is before
        pipe.profile(x, target=y, rounds=1)
    with pytest.raises(FxChimeraError, match="closed"):
        pipe.profile(x, target=y)


def test_a_pipeline_that_has_failed_measures_nothing() -> None:
    x, y = data(8)
    model, armed = chain(4), []

    def hook(*_: object) -> None:
        if armed:
            raise ValueError("planted mistake")

    model[3].register_forward_hook(hook)
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b") as pipe:
        pipe.profile(x, target=y, rounds=1)
        before = gradients_of(model)
        armed.append(1)
        for _ in range(2):
            with pytest.raises(PipelineError, match=r"rank 1 failed: .*planted mistake"):
                pipe.profile(x, target=y, rounds=1)
            armed.clear()
        assert_same_tensors(gradients_of(model), before)


def test_an_error_while_a_stage_is_timed_names_the_stage() -> None:
    """The steps go well, and then the hook counts one forward too many."""
    x, y = data(8)
    model, left = chain(4), [2 * 4 + 2]

    def hook(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("planted mistake")

    model[3].register_forward_hook(hook)
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b") as pipe:
        left[0] = 2 * 4 + 2  # two steps, and two forwards
        with pytest.raises(PipelineError, match=r"rank 1 failed: profile\(\), stage 1, forward and backward: .*planted mistake"):
            pipe.profile(x, target=y, rounds=1)


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    x = torch.zeros(8, 6, device="meta")
    with pytest.raises(FxChimeraError, match=r"parameter '0.weight' \(rank 0\) is on the meta device"):
        wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b", profile=True)
