"""What the ranks do in the tests of overlap: they are late, or slow to receive, or run for long."""

from __future__ import annotations

import random
import time
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.runtime.messages.distributed import DistributedTransport
from fxchimera.runtime.transport import Channel
from tests import workers
from tests.local.acting import around_actions
from tests.local.toys import chain, data, seeded, wrapped

__all__ = ["Nap", "resident", "run_long", "send_to_a_slow_receiver", "train_late"]

_WIDE = 2**17  # of double precision: 4 MiB for 4 rows, more than sockets hold


def train_late(name: str, stages: int, n: int, schedule: str) -> dict[str, Any]:
    """As ``workers.train``, with a random sleep before every action."""
    generator = random.Random(workers.rank())
    with pytest.MonkeyPatch.context() as patch:
        around_actions(patch, before=lambda *_: time.sleep(generator.choice([0.0, 0.0, 0.004])))
        return workers.train(name, stages, n, schedule)


class Widen(nn.Module):
    """[rows, 1] to [rows, wide]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Nap(nn.Module):
    """[rows, wide] to [rows, 1]; sleeps for a second in the first forward after ``tired`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.tired = False

    def forward(self, x: Tensor) -> Tensor:
        if self.tired:
            time.sleep(1.0)
            self.tired = False
        return x.mean(1, keepdim=True) * self.weight


def send_to_a_slow_receiver() -> list[tuple[str, float, float]]:
    """GPipe on 2 ranks: the second sleeps in its first forward; returns this rank's computations with start and end."""
    model = seeded(lambda: nn.Sequential(Widen(), Nap()))
    x, y = data(16, 1)
    with wrapped(model, x, loss_fn=F.mse_loss, num_stages=2, n_microbatches=4, schedule="gpipe", split_points=["1"]) as pipe:
        pipe.step(x, target=y)
        naps = [module for module in model.modules() if isinstance(module, Nap)]
        naps[0].tired = workers.rank() == 1
        pipe.step(x, target=y)
        assert pipe._timeline is not None
        return [(str(event.action), event.start, event.end) for event in pipe._timeline.events if event.action.kind.is_compute]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


Long = tuple[int, dict[Channel, tuple[int, int, int]]]


def run_long(schedule: str, stages: int, n: int, steps: int) -> Long:
    """Train; returns by how much the process has grown, and of every channel the buffers made, those in use, and their bound."""
    return Context().run(_run_long, schedule, stages, n, steps)  # without the watch of the pool, whose tables grow


def _run_long(schedule: str, stages: int, n: int, steps: int) -> Long:
    x, y = data(2 * n, 64)
    with wrapped(chain(8, width=64), x, num_stages=stages, n_microbatches=n, schedule=schedule) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

        def train(count: int) -> None:
            for _ in range(count):
                pipe.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()

        train(50)
        before = resident()
        train(steps)
        grown = resident() - before
        room, transport = pipe._orders.room(), pipe._engine._transports[0]
        assert isinstance(transport, DistributedTransport)
        pools = {c: (one.pool.made, one.pool.lent, room[c] + 1) for c, one in transport._incoming.items() if c[2] not in ("P", "G")}
        pools |= {c: (one.made, 0, room[c]) for c, one in transport._outgoing.items() if c[2] not in ("P", "G")}
    return grown, pools
