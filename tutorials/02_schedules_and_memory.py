# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which schedule, and what fits
#
# The first tutorial took what fxchimera chose. Here we look at the choice: what the known schedules would take for this model, what
# the search finds instead, what it knows about the best there can be, and what becomes of all that when a device has little memory.
#
# The model is a small GPT-2 of transformers. Nothing is downloaded, and the four ranks are threads of this notebook.

# %%
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import fxchimera

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
torch.set_num_threads(1)  # four ranks share this machine's cores

config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
tokens = torch.randint(512, (16, 64))
batch = {"input_ids": tokens, "labels": tokens}


def wrap(**options):
    return fxchimera.pipeline(model, example_kwargs=batch, num_stages=4, n_microbatches=8, **options)


# %% [markdown]
# ## The schedules side by side
#
# Wrapping plans everything and runs nothing, so schedules can be compared before one is used. A certificate holds what a step
# takes, how much of it a rank is idle, and a proven bound: no order of the same shape (one way, a V, both directions) takes less.
#
# The seconds are counted from operations and bytes, for a device that is much faster than this machine. What they say of schedules
# is their ratios.

# %%
steps = {}
for name in ("gpipe", "1f1b", "zbv", "chimera", "auto"):
    with wrap(schedule=name) as pipe:
        certificate = pipe.plan.certificate
    steps[name] = certificate.makespan
    idle = certificate.bubble / certificate.makespan
    above = certificate.makespan / certificate.lower_bound - 1
    print(f"{name:8} {1e6 * certificate.makespan:4.0f} us, idle {idle:5.1%}, {above:5.1%} above the bound")

assert steps["auto"] == min(steps.values())

# %% [markdown]
# `"auto"` is the default. It does not pick one of the others: it searches for the cut, the shape and the order together.

# %%
pipe = wrap()
pipe.draw()

# %% [markdown]
# ## Measured seconds
#
# `profile` runs every stage on its rank, one at a time: forward, backward, and the backward in its two halves, the one that the
# next rank waits for and the one that can be put off. The plan then holds what was measured. `pipeline(..., profile=True)` does
# that first, and cuts and orders by it.
#
# A step as predicted is compared with one that ran. On devices of their own they are close; here four ranks share the cores and the
# interpreter of one process, as the last line says.

# %%
print(pipe.profile(**batch))
pipe.close()

# %% [markdown]
# ## Less memory
#
# `memory=` is what a rank may need in all: parameters, gradients, the optimizer's state, copies of other ranks' stages,
# activations. There are three ways to need less: fewer micro-batches in flight, one copy of the weights instead of two, and
# computing parts of the forward again in the backward. The plan is the one that ends soonest.

# %%
for cap in (None, "8MiB", "4MiB"):
    with wrap(memory=cap) as pipe:
        plan = pipe.plan
    need = max(rank.total for rank in plan.memory)
    again = ", ".join(stage.recompute for stage in plan.stages)
    print(f"{cap or 'no cap':7} needs {need / 2**20:4.1f} MiB, {1e6 * plan.certificate.makespan:4.0f} us, computed again: {again}")

# %% [markdown]
# What cannot be met is said before anything runs, with what takes the memory and what would help.

# %%
try:
    wrap(memory="1MiB")
except fxchimera.FxChimeraError as error:
    print(error)

# %% [markdown]
# ## The same gradients
#
# A schedule changes when things are computed, and recomputation computes some of them twice. Neither changes the result.

# %%
with wrap(memory="4MiB") as pipe:
    print(pipe.verify(**batch))
    pipe.step(**batch)
    drawing = pipe.draw()
drawing

# %% [markdown]
# For a model that is too large for this machine, `fxchimera plan` makes the same tables from the meta device, and
# `fxchimera compare` the first of them from four numbers.
