"""``pipe.profile()``: right figures, errors that say why there are none, and a model that knows nothing of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxchimera
from fxchimera import FxChimeraError, PipelineError
from fxchimera.schedule import simulate
from tests.local.toys import Tanh, chain, data, seeded, wrapped
from tests.local.untouched import Stateful, untouched
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS
from tests.parity import assert_bitwise, assert_same_tensors, gradients_of
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


@pytest.mark.parametrize(
    ("schedule", "ranks", "places", "links"),
    [
        ("interleaved-1f1b", 3, (0, 1, 2, 0, 1, 2), [(0, 1), (1, 2), (2, 0)]),
        ("zbv", 2, (0, 1, 1, 0), [(0, 1)]),
        ("dualpipe", 2, (0, 1), [(0, 1)]),
        ("1f1b", 1, (0,), []),
    ],
)
def test_several_stages_a_rank(schedule: str, ranks: int, places: tuple[int, ...], links: list[tuple[int, int]]) -> None:
    """Every stage once, and every pair of ranks that are neighbours once."""
    x, y = data(12)
    with wrapped(chain(6), x, num_stages=ranks, n_microbatches=6, schedule=schedule) as pipe:
        profile = pipe.profile(x, target=y, rounds=1)
    assert (profile.ranks, [link.ranks for link in profile.links]) == (places, links)
    assert all(times.forward > 0.0 and times.backward > 0.0 for times in profile.stages)
    assert len(profile.stages) == len(places)


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
