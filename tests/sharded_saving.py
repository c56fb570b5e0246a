"""Checkpoints of stages that FSDP2 or tensor parallelism has sharded: what the processes of a 2 x 2 mesh do, and plain threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxchimera
from fxchimera import Pipeline
from fxchimera.runtime.weights import savedfiles
from tests.sharding import KINDS, ROWS, build, data
from tests.workers import Caught, caught, rank

__all__ = ["on_threads", "refused", "resumed"]


def moments(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and what the optimizer keeps of them, this rank's shares."""
    found: dict[str, Tensor] = {}
    for name, parameter in pipe.named_parameters():
        everything = {"": parameter.detach(), **{f".{key}": value for key, value in optimizer.state[parameter].items()}}
        found |= {name + key: local(value).clone() for key, value in everything.items()}
    return found


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class Run:
    """A pipeline of two stages over a 2 x 2 mesh, or of threads when ``kind`` is "plain"."""

    def __init__(self, kind: str, schedule: str, stages: int = 2) -> None:
        x, y = data()
        self.options: dict[str, Any] = {}
        if kind != "plain":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))
            own = mesh[kind]
            place = own.get_local_rank()
            if kind == "dp":
                x, y = x[place * ROWS // 2 : (place + 1) * ROWS // 2], y[place * ROWS // 2 : (place + 1) * ROWS // 2]
            parallelize = lambda stage_module, **_: KINDS[kind](own, stage_module)  # noqa: E731
            self.options = {"device_mesh": mesh, "parallelize": parallelize}
        self.x, self.y = x, y
        self.pipe = fxchimera.pipeline(
            build(), example_args=(x,), loss_fn=F.mse_loss, num_stages=stages, n_microbatches=2, seed=3,
            schedule=schedule if stages > 1 else "gpipe", **self.options,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.pipe.step(self.x, target=self.y)
            self.optimizer.step()
            self.optimizer.zero_grad()


def resumed(kind: str, schedule: str, folder: str, other: str | None = None) -> dict[str, Any]:
    """Four steps at once, and two, a checkpoint, and two more by a new pipeline; ``other`` has been saved elsewhere."""
    try:
        found: dict[str, Any] = {}
        with (run := Run(kind, schedule)).pipe as pipe:
            run.train(2)
            pipe.save(folder, optimizer=run.optimizer, extra={"epoch": 1})
            found["saved"] = pipe.state_dict()
            run.train(2)
            found["straight"] = moments(pipe, run.optimizer)
        with (run := Run(kind, schedule)).pipe as pipe:
            assert pipe.load(folder, optimizer=run.optimizer) == {"epoch": 1}
            run.train(2)
            found["resumed"] = moments(pipe, run.optimizer)
            found["sharded"] = sum(isinstance(p, DTensor) for p in pipe.parameters())
            if other is not None:
                pipe.load(other, optimizer=run.optimizer)
                found["other"] = pipe.state_dict()
        return found
    finally:
        dist.destroy_process_group()


def refused(kind: str, folder: str) -> list[Caught | bool]:
    """A damaged file, and a disk that is full on the rank that writes, are the error of all ranks, and nothing changes."""
    try:
        with (run := Run(kind, "1f1b")).pipe as pipe:
            run.train(1)
            pipe.save(folder, optimizer=run.optimizer)
            run.train(1)
            before = moments(pipe, run.optimizer)
            dist.barrier()
            path = sorted(Path(folder).glob("model-*.safetensors"))[-1]
            whole = path.read_bytes()
            dist.barrier()
            if rank() == 0:
                path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
            dist.barrier()
            answers: list[Caught | bool] = [caught(lambda: pipe.load(folder, optimizer=run.optimizer))]
            if rank() == 0:
                path.write_bytes(whole)
            dist.barrier()
            written = savedfiles.save_file
            if os.environ["RANK"] == "2":
                savedfiles.save_file = full
            answers.append(caught(lambda: pipe.save(folder, optimizer=run.optimizer)))
            savedfiles.save_file = written
            after = moments(pipe, run.optimizer)
            answers.append(all(torch.equal(value, before[name]) for name, value in after.items()))
            pipe.load(folder, optimizer=run.optimizer)  # the first save is whole
        return answers
    finally:
        dist.destroy_process_group()


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def on_threads(stages: int, folder: str | Path, *, save: bool = False) -> dict[str, Tensor]:
    """Load a checkpoint, or train two steps and make one, without processes; returns the full state."""
    with (run := Run("plain", "1f1b", stages)).pipe as pipe:
        if save:
            run.train(2)
            pipe.save(folder, optimizer=run.optimizer)
        else:
            pipe.load(folder, optimizer=run.optimizer)
            assert len(run.optimizer.state) == len(list(pipe.parameters()))
        return pipe.state_dict()
