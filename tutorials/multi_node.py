"""Trains a small transformer; the same file for a notebook's machine, one node and many (multi_node.md has the command lines).

    python tutorials/multi_node.py --num-stages 4                                   ranks are threads of this process
    torchrun --nproc-per-node 4 tutorials/multi_node.py --num-stages 4              one process a rank
    torchrun --nnodes 2 --nproc-per-node 4 ... tutorials/multi_node.py --num-stages 4     two pipelines, a node each

The task: of a sequence that counts up in steps of one, two or three, say the next number.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

import fxchimera

VOCABULARY, LENGTH, WIDTH = 32, 12, 32


class Counter(nn.Module):
    """Embedding, four encoder layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens) + self.places)[:, -1])


def batch_of(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step: sequences [rows, LENGTH] and what follows [rows]."""
    generator = torch.Generator().manual_seed(number)
    start = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, -1]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=4)
    parser.add_argument("--n-microbatches", type=int, default=4, help="of each pipeline")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--rows", type=int, default=32, help="of the whole batch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank-placement", default="compact", help='or "mirrors_apart"')
    parser.add_argument("--zero", action="store_true", help="shard the optimizer's state over the pipelines")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    pipe = fxchimera.pipeline(
        Counter(),
        example_args=(batch_of(0, options.n_microbatches)[0],),  # batches may have more rows
        loss_fn=nn.functional.cross_entropy,
        num_stages=options.num_stages,
        n_microbatches=options.n_microbatches,
        schedule=options.schedule,
        rank_placement=options.rank_placement,
    )
    if options.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            pipe.parameters(), optimizer_class=torch.optim.AdamW, process_group=pipe.data_parallel_group, lr=3e-3
        )
    else:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    losses = []
    with pipe:
        for number in range(options.steps):
            tokens, following = batch_of(number, options.rows)
            own, size = pipe.data_parallel_rank, pipe.data_parallel_size  # with a data set: DistributedSampler(data, size, own)
            loss = pipe.step(tokens.tensor_split(size)[own], target=following.tensor_split(size)[own])
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # the loss of the whole batch, on every rank
        state = pipe.state_dict()  # the whole model on rank 0, {} elsewhere
        if state:
            print("losses", *losses)
    return losses


if __name__ == "__main__":
    main()
