"""A loop of accelerate, with a pipeline in the place of the model.

    pip install accelerate
    python tutorials/loops/accelerate_loop.py                              ranks are threads of this process
    torchrun --nproc-per-node 2 tutorials/loops/accelerate_loop.py         ranks are processes

The optimizer is prepared, model and data are not: accelerate would wrap the model in DistributedDataParallel, and give each process
another part of the data, where all ranks of one pipeline take the same batch.  ``register_for_checkpointing`` takes the pipeline,
so that ``save_state`` and ``load_state`` hold its weights with the rest.  Where ranks are processes accelerate would save the
optimizer of the first only: there save ``pipe.state_dict()``, and the state of each rank's optimizer in a file of its own.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from plain import STEPS, make_batches, make_model, make_optimizer  # the same small GPT-2 and random tokens

import fxchimera


def train(folder: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model, batches, held_out = make_model(), make_batches(2 * STEPS), make_batches(1, seed=1)[0]
    pipe = fxchimera.pipeline(model, example_kwargs={"input_ids": batches[0], "labels": batches[0]}, num_stages=2, n_microbatches=4)
    optimizer = accelerator.prepare(make_optimizer(pipe.named_parameters()))
    accelerator.register_for_checkpointing(pipe)
    losses = []
    for tokens in batches:
        with accelerator.accumulate(model):
            loss = pipe.step(input_ids=tokens, labels=tokens, loss_scale=1 / accelerator.gradient_accumulation_steps)
            if accelerator.sync_gradients:
                pipe.clip_grad_norm_(1.0)  # of all ranks; accelerator.clip_grad_norm_ would see this rank's
            optimizer.step()  # does nothing between two updates
            optimizer.zero_grad()
        losses.append(loss.item())
    validation = pipe.evaluate(input_ids=held_out, labels=held_out).item()
    if accelerator.num_processes == 1:
        accelerator.save_state(folder)
        pipe.step(input_ids=held_out, labels=held_out)
        optimizer.step()
        accelerator.load_state(folder)  # as if that step had never been
    state = pipe.state_dict()
    pipe.close()
    return losses, validation, state


if __name__ == "__main__":
    losses, validation, _ = train("checkpoint")
    print("losses", *(f"{loss:.4f}" for loss in losses), f"validation {validation:.4f}")
