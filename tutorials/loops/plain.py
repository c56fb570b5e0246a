"""A training loop of your own, with a pipeline in the place of the model.

    python tutorials/loops/plain.py                              ranks are threads of this process
    torchrun --nproc-per-node 2 tutorials/loops/plain.py         ranks are processes

Only the three lines marked with # pipe differ from a loop on one device.  The loop has what loops have: two groups of parameters, a
schedule of the learning rate, accumulation over two batches, clipping, validation, a checkpoint, and the best of two checkpoints.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fxchimera

STEPS, ACCUMULATE = 4, 2


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=60, n_positions=16, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Token ids [8 rows, 16 tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(60, (8, 16), generator=generator) for _ in range(count)]


def make_optimizer(named) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay and nothing else."""
    named = list(named)
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def train() -> tuple[list[float], float, dict[str, torch.Tensor]]:
    model, batches, held_out = make_model(), make_batches(STEPS * ACCUMULATE), make_batches(1, seed=1)[0]
    example = {"input_ids": batches[0], "labels": batches[0]}
    pipe = fxchimera.pipeline(model, example_kwargs=example, num_stages=2, n_microbatches=4)  # pipe
    optimizer = make_optimizer(pipe.named_parameters())  # what this rank owns; a plain optimizer
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        loss = 0.0
        for tokens in batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            part = pipe.step(input_ids=tokens, labels=tokens, loss_scale=1 / ACCUMULATE)  # pipe: forward and backward
            loss += part.item() / ACCUMULATE  # the batch's loss, on every rank
        pipe.clip_grad_norm_(1.0)  # pipe: the norm of all ranks' gradients
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss)
    validation = pipe.evaluate(input_ids=held_out, labels=held_out).item()
    state = pipe.state_dict()  # on rank 0, under the model's own names
    pipe.close()
    return losses, validation, state


if __name__ == "__main__":
    losses, validation, state = train()
    if state:  # rank 0
        print("losses", *(f"{loss:.4f}" for loss in losses), f"validation {validation:.4f}")
        again = make_model()
        again.load_state_dict(state)
