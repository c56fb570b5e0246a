"""A training run that can be saved and gone on with, for threads and for processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxchimera

__all__ = ["LAYERS", "Saver", "die_at", "die_in_save", "net", "run"]

LAYERS, WIDTH = 12, 6


class Block(nn.Module):
    """Dropout, so that the step number counts, batch norm, so that buffers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


def net(layers: int = LAYERS) -> nn.Module:
    """Twelve layers, so that "10" and "11" sort before "2", the last tied to the first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(layers)))
    model[-1].linear.weight = model[0].linear.weight
    return model


class Saver:
    """A pipeline of ``stages`` with an optimizer in two groups and a scheduler."""

    def __init__(self, stages: int, *, seed: int = 5, layers: int = LAYERS, schedule: str = "1f1b") -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
        self.model = net(layers)
        self.pipe = fxchimera.pipeline(
            self.model, example_args=(self.x,), loss_fn=nn.functional.mse_loss, num_stages=stages, n_microbatches=4, seed=seed,
            schedule=schedule if stages > 1 else "gpipe",
        )  # fmt: skip
        named = list(self.pipe.named_parameters())
        groups = [
            {"params": [p for name, p in named if ("bias" in name) == plain], "weight_decay": 0.0 if plain else 0.1}
            for plain in (False, True)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.8)

    def train(self, steps: int) -> list[torch.Tensor]:
        """Some steps; returns their losses."""
        losses = []
        for _ in range(steps):
            losses.append(self.pipe.step(self.x, target=self.y))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def save(self, folder: Path) -> None:
        self.pipe.save(folder, optimizer=self.optimizer, extra={"scheduler": self.scheduler.state_dict()})

    def load(self, folder: Path) -> None:
        self.scheduler.load_state_dict(self.pipe.load(folder, optimizer=self.optimizer)["scheduler"])


def run(
    stages: int, before: int, folder: Path | None, load: bool, *, save: bool = False, schedule: str = "1f1b"
) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Load, train, save, as asked for; returns losses, the full state, and this rank's optimizer state by name."""
    run = Saver(stages, seed=99 if load else 5, schedule=schedule)
    if load and folder is not None:
        run.load(folder)
    losses = run.train(before)
    if save and folder is not None:
        run.save(folder)
    state = run.pipe.state_dict()
    numbers = {id(p): n for n, p in enumerate(p for group in run.optimizer.param_groups for p in group["params"])}
    packed = run.optimizer.state_dict()["state"]
    moments = {name: packed[numbers[id(parameter)]] for name, parameter in run.pipe.named_parameters()}
    run.pipe.close()
    return losses, state, moments


def die_in_save(folder: Path) -> None:
    """Rank 0 dies when all files of the second save are written and the index is about to be replaced."""
    run = Saver(2)
    run.train(1)
    run.save(folder)
    run.train(1)
    if os.environ["RANK"] == "0":
        os.replace = lambda *_: os._exit(9)
    run.save(folder)


def die_at(folder: Path, victim: int, seconds: float) -> None:
    """One rank is killed some time after the second save has begun, wherever that is then."""
    run = Saver(2)
    run.train(1)
    run.save(folder)
    run.train(1)
    if os.environ["RANK"] == str(victim):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    for _ in range(1000):  # again and again, until the other rank is gone
        run.save(folder)
