"""Stages parallelized further by torch's own means, over the second dimension of a 2 x 2 mesh: what every process does.

The model is a chain of blocks between an embedding and a head, in float64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxchimera
from tests.workers import Caught, caught

__all__ = ["build", "data", "labels", "masked", "nothing_is_nan", "plain", "refusals", "train"]

WIDTH, ROWS, STEPS = 8, 8, 3


class Block(nn.Module):
    """Two linears with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks in a list, as large models have them."""

    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        self.enter, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.scale is None else x * self.scale)


def build(**options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net(**options).double().train()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(ROWS, 3, generator=generator, dtype=torch.float64),
    )


def shard_stage(mesh: DeviceMesh, stage_module: nn.Module) -> None:
    """FSDP2: every block, and what is left of the stage."""
    for block in getattr(stage_module, "blocks", nn.Module()).children():
        fully_shard(block, mesh=mesh)
    fully_shard(stage_module, mesh=mesh)


def split_stage(mesh: DeviceMesh, stage_module: nn.Module) -> None:
    """Tensor parallelism inside every block."""
    for block in getattr(stage_module, "blocks", nn.Module()).children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


KINDS = {"dp": shard_stage, "tp": split_stage}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(kind: str, schedule: str) -> dict[str, Any]:
    """Steps of AdamW with clipping; with FSDP2 each of the two pipelines has half of the rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))
    own = mesh[kind]
    called: list[int] = []

    def parallelize(stage_module: nn.Module, *, stage: int, device: torch.device) -> nn.Module:
        assert device.type == "cpu"
        called.append(stage)
        KINDS[kind](own, stage_module)
        return stage_module

    try:
        x, y = data()
        part = slice(own.get_local_rank() * ROWS // 2, (own.get_local_rank() + 1) * ROWS // 2) if kind == "dp" else slice(None)
        with fxchimera.pipeline(
            build(), example_args=(x[part],), loss_fn=F.mse_loss, num_stages=2, n_microbatches=2, schedule=schedule,
            device_mesh=mesh, parallelize=parallelize,
        ) as pipe:  # fmt: skip
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
            gradients, norms, losses = [], [], []
            for _ in range(STEPS):
                losses.append(float(pipe.step(x[part], target=y[part])))
                gradients.append({name: whole(p.grad).clone() for name, p in pipe.named_parameters() if p.grad is not None})
                norms.append(float(pipe.clip_grad_norm_(0.1)))
                optimizer.step()
                optimizer.zero_grad()
            sharded = sorted(name for name, p in pipe.named_parameters() if isinstance(p, DTensor))
            evaluated = float(pipe.evaluate(x[part], target=y[part]))
            output = pipe(x[part])
            state = pipe.state_dict()
            pipe.load_state_dict({key: value + 1 for key, value in state.items()})
            changed = pipe.state_dict()
            errors = [
                caught(lambda: pipe.verify(x[part], target=y[part])),
                caught(lambda: pipe.step(x[:2], target=y[:2])),
            ]
        return {
            "losses": losses, "gradients": gradients, "norms": norms, "sharded": sharded, "evaluated": evaluated, "state": state,
            "changed": changed, "output": output, "called": called, "own": own.get_local_rank(), "errors": errors,
        }  # fmt: skip
    finally:
        dist.destroy_process_group()


def masked(schedule: str) -> dict[str, Any]:
    """A step; in one of the two pipelines that FSDP2 joins no label of the second micro-batch counts, see :func:`labels`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    own = mesh["dp"]
    try:
        x, y = data()[0], labels()
        part = slice(own.get_local_rank() * ROWS // 2, (own.get_local_rank() + 1) * ROWS // 2)
        with fxchimera.pipeline(
            build(), example_args=(x[part],), loss_fn=nothing_is_nan, loss_weight=IGNORED, num_stages=2, n_microbatches=2,
            schedule=schedule, device_mesh=mesh, parallelize=lambda stage_module, **_: shard_stage(own, stage_module),
        ) as pipe:  # fmt: skip
            loss = float(pipe.step(x[part], target=y[part]))
            gradients = {name: whole(p.grad).clone() for name, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": loss, "gradients": gradients, "own": own.get_local_rank()}
    finally:
        dist.destroy_process_group()


IGNORED = -100


def nothing_is_nan(output: Tensor, target: Tensor) -> Tensor:
    """A cross entropy whose gradients, not only its value, are nan when no label counts."""
    counts = target != IGNORED
    return (F.cross_entropy(output, target, ignore_index=IGNORED, reduction="none") * counts).sum() / counts.sum()


def labels() -> Tensor:
    """Classes of the rows; of the first half, which one pipeline gets, only the first micro-batch's count."""
    y = torch.arange(ROWS) % 3
    y[ROWS // 4 : ROWS // 2] = IGNORED
    return y


def plain() -> dict[str, Any]:
    """The same training of the plain model, micro-batches of a quarter of the rows."""
    model, (x, y) = build(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients, norms, losses = [], [], []
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        output = model.eval()(x)
        return {
            "losses": losses, "gradients": gradients, "norms": norms, "state": state, "output": output,
            "evaluated": float(F.mse_loss(output, y)),
        }  # fmt: skip


def refusals() -> list[Caught]:
    """What parallelize may not do, on threads."""
    x, _ = data()

    def wrap(parallelize: Any, model: nn.Module | None = None, **options: Any) -> Caught:
        options = {"schedule": "1f1b", **options}
        return caught(
            lambda: fxchimera.pipeline(
                build() if model is None else model, example_args=(x,), loss_fn=F.mse_loss, num_stages=2, n_microbatches=2,
                parallelize=parallelize, **options,
            )
        )  # fmt: skip

    def replaced(stage_module: nn.Module, **_: Any) -> None:
        stage_module.blocks.register_module("0", nn.Linear(WIDTH, WIDTH).double())

    def scaled(stage_module: nn.Module, **_: Any) -> None:
        if hasattr(stage_module, "scale"):
            stage_module.scale = nn.Parameter(torch.ones(WIDTH))

    def narrowed(stage_module: nn.Module, **_: Any) -> None:
        for block in stage_module.blocks.children():
            block.float()

    tied = build()
    tied.blocks[3].up.weight = tied.blocks[0].up.weight

    def nothing(stage_module: nn.Module, **_: Any) -> None:
        pass

    return [
        wrap(nothing, schedule="chimera"), wrap(nothing, tied), wrap(lambda stage_module, **_: nn.Sequential(stage_module)),
        wrap(replaced), wrap(scaled, build(scaled=True)), wrap(narrowed), wrap(nothing, compile=True), wrap(nothing, profile=True),
        wrap(nothing, recompute="full"),
    ]  # fmt: skip
