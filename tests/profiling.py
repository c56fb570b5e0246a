"""What the ranks of tests/process/test_profile.py do; every function runs in each process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.local.toys import chain, data, seeded, wrapped
from tests.local.wrapped import step, wrap
from tests.models import MODELS
from tests.sleeping import slow_chain
from tests.workers import Caught, caught, owned_gradients, rank, threads

__all__ = ["broken_backward", "differ", "measured_and_trained", "planned_anew"]


def measured_and_trained(name: str, stages: int, n: int, schedule: str) -> dict[str, Any]:
    """Measure, then one step."""
    example = MODELS[name](batch=2 * n, dropout=0.1)
    with wrap(example, stages, n, schedule) as pipe:
        before = pipe.state_dict(full=False)
        before = {key: value.clone() for key, value in before.items()}
        profile = pipe.profile(*example.args, target=example.target, rounds=2, **example.kwargs)
        after = {key: value.clone() for key, value in pipe.state_dict(full=False).items()}
        untouched = owned_gradients(pipe)
        plan = pipe.plan
        shown = str(pipe.draw())
        loss = step(pipe, example).loss
        gradients = owned_gradients(pipe)
    return {
        "profile": profile, "plan": (repr(plan.cut), plan.order, plan.costs, plan.certificate), "shown": shown, "loss": loss,
        "gradients": gradients, "untouched": untouched, "before": before, "after": after,
    }  # fmt: skip


def planned_anew(schedule: str) -> dict[str, Any]:
    """A chain with one slow layer, cut from measurements; then one step."""
    x, y = data(8)
    model = seeded(lambda: slow_chain(4.0, 0.2, 0.2, 0.2))
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule=schedule, profile=True) as pipe:
        plan, groups = pipe.plan, dist.get_world_size()
        loss = pipe.step(x, target=y)
        recordings = pipe._preparation._programs.recordings
        gradients = owned_gradients(pipe)
    return {
        "plan": (repr(plan.cut), plan.order, plan.costs), "nodes": [stage.nodes for stage in plan.stages], "loss": loss,
        "gradients": gradients, "recordings": recordings, "world": groups, "latency": plan.measures.link.latency,
    }  # fmt: skip


def differ() -> tuple[Caught, Caught, float]:
    """Ranks that mean different measurements, or make different calls; a good one must be possible afterwards."""
    x, y = data(8)
    with wrapped(chain(4), x, num_stages=2, n_microbatches=4) as pipe:
        rounds = caught(lambda: pipe.profile(x, target=y, rounds=1 + rank()))
        calls = caught(lambda: pipe.step(x, target=y) if rank() else pipe.profile(x, target=y, rounds=1))
        return rounds, calls, pipe.profile(x, target=y, rounds=1).measured


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("planted mistake")


class _Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return _Broken.apply(self.linear(x))


def broken_backward() -> tuple[Caught, list[str]]:
    """The second stage cannot be timed, so no pipeline is made."""
    x, _ = data(8)
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), _Last()))
    options: dict[str, Any] = {"num_stages": 2, "n_microbatches": 2, "schedule": "1f1b", "split_points": ["1"], "profile": True}
    return caught(lambda: wrapped(model, x, **options)), threads()
