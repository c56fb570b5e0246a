"""torch's own tools around a pipeline: functions that run in every process of a pool, or in one with ranks as threads."""

from __future__ import annotations

import contextvars
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.profiler import ProfilerActivity, profile

from tests import workers
from tests.local.wrapped import step, wrap
from tests.models import MODELS
from tests.parity import split

__all__ = ["compiled", "profiled", "scaled", "scaled_plainly", "trained_in_autocast"]

SCALE, WINDOW = 2.0**19, 3  # the first steps overflow in half precision; a few good ones double the scale again


def trained_in_autocast(name: str, stages: int, n: int, schedule: str) -> dict[str, Any]:
    """Three optimizer steps in one region."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return workers.train(name, stages, n, schedule)


def compiled(name: str, stages: int, n: int, schedule: str) -> dict[str, Any]:
    """Train compiled stages, without the check of a pool that watches operators one by one."""
    return contextvars.Context().run(_compiled, name, stages, n, schedule)


def _compiled(name: str, stages: int, n: int, schedule: str) -> dict[str, Any]:
    example = MODELS[name](batch=2 * n)
    with wrap(example, stages, n, schedule, compile={"backend": "aot_eager"}) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        losses = []
        for _ in range(2):
            losses.append(float(step(pipe, example).loss))
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": losses, "state": pipe.state_dict()}


def profiled(name: str, stages: int, n: int, schedule: str) -> tuple[Counter[str], Counter[str]]:
    """What the profiler of this process saw of a step, and the actions of this process's ranks."""
    example = MODELS[name](batch=2 * n)
    with wrap(example, stages, n, schedule) as pipe:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            step(pipe, example)
        order = pipe._orders.step
        actions = Counter(f"PP:{action}" for rank in pipe._world.ranks for action in order.ranks[rank])
    return Counter(event.name for event in found.events() if event.name.startswith("PP:")), actions


def _half() -> Any:
    return torch.autocast("cpu", dtype=torch.float16)


def scaled(name: str, stages: int, n: int, schedule: str, steps: int) -> dict[str, Any]:
    """Train in half precision with a gradient scaler and clipping; returns the scales, which steps were skipped, and the state."""
    example = MODELS[name](batch=2 * n)
    scales, skipped, losses = [], [], []
    with wrap(example, stages, n, schedule) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        processes = dist.is_initialized()
        scaler = (ShardedGradScaler if processes else torch.amp.GradScaler)("cpu", init_scale=SCALE, growth_interval=WINDOW)
        for _ in range(steps):
            before = {key: p.detach().clone() for key, p in pipe.named_parameters()}
            with _half():
                loss = pipe.step(*example.args, target=example.target, loss_scale=scaler.scale(torch.ones(())), **example.kwargs)
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            losses.append(float(loss))
            skipped.append(all(torch.equal(before[key], p) for key, p in pipe.named_parameters()))
        state = pipe.state_dict()
    return {"scales": scales, "skipped": skipped, "losses": losses, "state": state}


def scaled_plainly(name: str, n: int, steps: int) -> dict[str, Any]:
    """The same by the plain model, micro-batch by micro-batch, with torch alone."""
    example = MODELS[name](batch=2 * n)
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=WINDOW)
    scales, skipped, losses = [], [], []
    for _ in range(steps):
        before = {key: value.clone() for key, value in example.model.state_dict().items()}
        losses.append(0.0)
        for piece in split(example, n):
            with _half():
                loss = piece.loss(piece.model(*piece.args, **piece.kwargs)) / n
            scaler.scale(loss).backward()
            losses[-1] += float(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(example.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        skipped.append(all(torch.equal(before[key], value) for key, value in example.model.state_dict().items()))
    state: dict[str, Tensor] = example.model.state_dict()
    return {"scales": scales, "skipped": skipped, "losses": losses, "state": state}
