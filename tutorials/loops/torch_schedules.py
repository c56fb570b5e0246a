"""The same stages under the schedules of ``torch.distributed.pipelining``: a peer to compare with, and a way back.

    torchrun --nproc-per-node 2 tutorials/loops/torch_schedules.py

``torch_stages`` cuts a model as ``fxchimera.pipeline`` does.  A runner steps the stages of one rank, under a schedule class of
torch's or, without one, under an order of ours in torch's runtime; it takes the whole batch on every rank.  Every rank has an
optimizer for its own stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from fxchimera.interop import torch_stages

N = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(60, 32), *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)), nn.Linear(32, 60))


def make_batches(count: int) -> list[torch.Tensor]:
    """Token ids [8 rows, 16 tokens]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(60, (8, 16), generator=generator) for _ in range(count)]


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train() -> dict[str, list[float]]:
    """Losses by schedule, on the rank of the last stage."""
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    rank, world, batches = dist.get_rank(), dist.get_world_size(), make_batches(4)
    found: dict[str, list[float]] = {}
    for name, ours, theirs in (("torch 1F1B", "1f1b", Schedule1F1B), ("our zb-h1", "zb-h1", None)):
        stages = torch_stages(make_model(), example_args=(batches[0],), num_stages=world, n_microbatches=N, schedule=ours)
        runner = stages.runner(rank, theirs, loss_fn=token_loss)
        optimizer = torch.optim.SGD(runner.parameters(), lr=0.5)
        losses = []
        for tokens in batches:
            loss = runner.step(tokens, target=tokens)  # None but on the last stage's rank
            optimizer.step()
            optimizer.zero_grad()
            losses += [] if loss is None else [loss.item()]
        found[name] = losses
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    for name, losses in train().items():
        if losses:
            print(name, *(f"{loss:.4f}" for loss in losses), flush=True)
