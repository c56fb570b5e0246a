"""Two pipelines of two stages that save, load, begin on the meta device, share the optimizer's state: what every process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fxchimera
from fxchimera import Pipeline
from tests.metamodels import llama, on_meta, tokens
from tests.saving import WIDTH, net

__all__ = ["Wide", "begin", "go_on", "save_or_load"]

ROWS = 8


class Wide:
    """A pipeline of two stages and its optimizer; with ``width`` 2 this process has the rows of its own pipeline."""

    def __init__(self, width: int, *, stages: int = 2, zero: bool = False, schedule: str = "1f1b", seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(3)
        x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        self.pipe: Pipeline = fxchimera.pipeline(
            net(), example_args=(x[: ROWS // width],), loss_fn=nn.functional.mse_loss, num_stages=stages, n_microbatches=2,
            seed=seed, schedule=schedule if stages > 1 else "gpipe", batch_norm="deferred",
        )  # fmt: skip
        place = self.pipe.data_parallel_rank
        self.x, self.y = (value.chunk(width)[place] for value in (x, y))
        if zero:
            self.optimizer: Any = ZeroRedundancyOptimizer(
                self.pipe.parameters(), optimizer_class=torch.optim.AdamW, process_group=self.pipe.data_parallel_group, lr=1e-2
            )
        else:
            self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)

    def train(self, steps: int) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            losses.append(self.pipe.step(self.x, target=self.y))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def owned(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.pipe.state_dict(full=False).items()}


def go_on(folder: str, schedule: str, zero: bool) -> dict[str, Any]:
    """Four steps without a break, and with a checkpoint in the middle; each rank's part, and the losses."""
    straight = Wide(2, zero=zero, schedule=schedule)
    losses = straight.train(2)
    straight.pipe.save(folder, optimizer=straight.optimizer, extra={"at": straight.pipe.data_parallel_rank})
    saved = straight.pipe.state_dict()
    losses += straight.train(2)
    wanted = straight.owned()
    straight.pipe.close()
    later = Wide(2, zero=zero, schedule=schedule, seed=77)
    extra = later.pipe.load(folder, optimizer=later.optimizer)
    again = later.train(2)
    found = later.owned()
    later.pipe.close()
    return {"losses": losses, "again": again, "wanted": wanted, "found": found, "saved": saved, "extra": extra}


def save_or_load(width: int, folder: str | Path, *, zero: bool = False, stages: int = 2, save: bool = False) -> dict[str, Any]:
    """Train two steps and save, or load and train one; returns the full state before that step, and this rank's part after it."""
    run = Wide(width, stages=stages, zero=zero)
    if save:
        run.train(2)
        run.pipe.save(folder, optimizer=run.optimizer)
    else:
        run.pipe.load(folder, optimizer=run.optimizer)
    state = run.pipe.state_dict()
    run.train(1)
    owned = run.owned()
    run.pipe.close()
    return {"state": state, "owned": owned}


def begin(kind: str, folder: str | None, schedule: str) -> dict[str, Any]:
    """A Llama from the meta device by checkpoint, by its own initialisation, or by ``param_init_fn``; two steps with ZeRO-1."""
    torch.manual_seed(11)  # the same for all, as a script would have it
    model, x = on_meta(llama, tied=True).train(), tokens()
    options: dict[str, Any] = {"checkpoint": folder} if kind == "checkpoint" else {}
    if kind == "function":
        options = {"param_init_fn": halves}
    example = {"input_ids": x[:4], "labels": x[:4]}
    with fxchimera.pipeline(
        model, example_kwargs=example, num_stages=2, n_microbatches=2, schedule=schedule, seed=3, **options
    ) as pipe:
        start = pipe.state_dict()
        real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
        names = [name for name, _ in pipe.named_parameters()]
        begun = {name: value.detach().clone() for name, value in pipe.named_parameters()}
        optimizer = ZeroRedundancyOptimizer(
            pipe.parameters(), optimizer_class=torch.optim.AdamW, process_group=pipe.data_parallel_group, lr=1e-2
        )
        mine = x.chunk(2)[pipe.data_parallel_rank]
        losses = []
        for _ in range(2):
            losses.append(pipe.step(input_ids=mine, labels=mine))
            optimizer.step()
            optimizer.zero_grad()
        owned = {name: value.detach().clone() for name, value in pipe.named_parameters()}
        verified = pipe.verify(input_ids=mine, labels=mine)
        return {
            "start": start, "real": real, "names": names, "begun": begun, "losses": losses, "owned": owned,
            "verified": (verified.bitwise, str(verified)), "state": pipe.state_dict(),
        }  # fmt: skip


def halves(module: nn.Module) -> None:
    """Fill what a module has by itself."""
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)
