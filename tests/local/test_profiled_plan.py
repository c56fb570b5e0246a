"""``pipeline(..., profile=True)``: the cut and the order come from what stages, and what is in them, really take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera import FxChimeraError
from fxchimera.planner import draft as drafting
from fxchimera.runtime.steps import probe
from fxchimera.schedule import simulate
from tests.local.toys import chain, data, plain, seeded, wrapped
from tests.local.untouched import untouched
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS
from tests.parity import Outcome, assert_bitwise, assert_close, gradients_of
from tests.sleeping import BACKWARD, FORWARD, slow_chain


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
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


def test_operations_that_cannot_be_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage is, so a plan can be made all the same; and the user is told."""

    def refuse(*_: object) -> None:
        raise KeyError("lonely")

    monkeypatch.setattr(probe, "measured_stage", refuse)
    x, y = data(8)
    model = chain(4)
    with pytest.warns(UserWarning, match=r"stage \d could not be timed one by one \(KeyError: 'lonely'\)"):
        pipe = wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b", profile=True)
    with pipe:
        pipe.step(x, target=y)
        assert pipe.plan.measures.link.latency > 0.0


def test_a_loss_without_target_is_part_of_the_last_stage() -> None:
    x, _ = data(8)
    called = []

    def loss_fn(output: Tensor) -> Tensor:
        called.append(tuple(output.shape))
        return output.square().mean()

    def with_target(output: Tensor, target: Tensor) -> Tensor:
        raise AssertionError("there is no target at wrap")

    for loss in (loss_fn, with_target):
        wrapped(chain(2), x, loss_fn=loss, num_stages=2, n_microbatches=4, schedule="1f1b", profile=True).close()
    assert set(called) == {(2, 6)}


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    x = torch.zeros(8, 6, device="meta")
    with pytest.raises(FxChimeraError, match=r"parameter '0.weight' \(rank 0\) is on the meta device"):
        wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b", profile=True)
