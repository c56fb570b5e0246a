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
# # A first pipeline
#
# We take a model that somebody else wrote, wrap it in one line, train it on four stages, and check that nothing changed but the
# time table. No GPU and no launcher is needed: the four ranks run as threads of this notebook.
#
# The model is transformers' vision transformer with random weights. The task: say which way the stripes of a noisy picture run.

# %%
import torch
from transformers import ViTConfig, ViTForImageClassification

import fxchimera

torch.manual_seed(0)
torch.set_num_threads(1)  # four ranks share this machine's cores

config = ViTConfig(
    image_size=16, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, intermediate_size=64
)
config.num_labels = 2
model = ViTForImageClassification(config)
generator = torch.Generator().manual_seed(0)


def stripes(rows):
    """Pictures [rows, 1, 16, 16] with stripes across (label 0) or down (label 1), and noise."""
    labels = torch.randint(2, (rows,), generator=generator)
    wave = (torch.arange(16) // 2 % 2).float()
    across, down = wave[:, None].expand(16, 16), wave.expand(16, 16)
    pictures = torch.where(labels[:, None, None].bool(), down, across)[:, None]
    return pictures + 0.3 * torch.randn(pictures.shape, generator=generator), labels


pictures, labels = stripes(32)

# %% [markdown]
# ## One line
#
# The example batch shows fxchimera what a batch will look like. It runs the model once to record what happens, measures what each
# part costs, and cuts it into stages of equal cost. This model computes its own loss when it is given `labels`, so there is no
# `loss_fn`; for a model that does not, pass any function of output and target.

# %%
pipe = fxchimera.pipeline(
    model,
    example_kwargs={"pixel_values": pictures, "labels": labels},
    num_stages=4,
    n_microbatches=8,
    schedule="chimera",
)

# %% [markdown]
# ## The plan
#
# Which rank has which stage, how long a micro-batch takes there, how many bytes of weights it holds, and what crosses to the next.

# %%
pipe.plan

# %% [markdown]
# ## The picture
#
# Time runs to the right, one row a rank. Chimera sends half of the micro-batches down the ranks and half up, so that a rank which
# would wait for one direction works for the other. Rank 0 holds the first stage of the down pipe and the last of the up pipe.

# %%
pipe.draw()

# %% [markdown]
# ## Your loop
#
# `pipe.parameters()` are the model's own parameters, so any optimizer of torch does. `step` runs forward and backward of all
# micro-batches and leaves the gradients of the whole batch in `.grad`; the loss it returns is the batch's.

# %%
optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
losses = []
for _ in range(30):
    pictures, labels = stripes(32)
    loss = pipe.step(pixel_values=pictures, labels=labels)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

print("loss", " ".join(f"{loss:.2f}" for loss in losses[::5]), f"{losses[-1]:.2f}")
assert losses[-1] < 0.5 * losses[0]

# %% [markdown]
# Now the drawing has two parts: the step as predicted, and the last step as it ran. Here the ranks share few cores and the model is
# tiny, so the second is ragged; on devices of their own they look alike.

# %%
pipe.draw()

# %% [markdown]
# `evaluate` is the loss in eval mode, without gradients; calling the pipeline gives the model's output.

# %%
pictures, labels = stripes(64)
pipe.eval()
output = pipe(pixel_values=pictures, labels=labels)
pipe.train()
accuracy = (output.logits.argmax(-1) == labels).float().mean().item()
print(f"loss {pipe.evaluate(pixel_values=pictures, labels=labels).item():.3f}, accuracy {accuracy:.0%}")

# %% [markdown]
# ## Is it still my model?
#
# `verify` runs one batch through the pipeline and through the plain model and compares all that a step makes.

# %%
print(pipe.verify(pixel_values=pictures[:32], labels=labels[:32]))

# %% [markdown]
# ## Take the weights home
#
# `state_dict` has the model's own names. A fresh model loads it; nothing of the pipeline is in the file.

# %%
torch.save(pipe.state_dict(), "stripes.pt")
plain = ViTForImageClassification(config)
plain.load_state_dict(torch.load("stripes.pt"))
plain.eval()
with torch.no_grad():
    alone = plain(pixel_values=pictures).logits
assert torch.allclose(alone, output.logits, atol=1e-5)
pipe.close()

# %% [markdown]
# The same file, as a script under `torchrun --nproc-per-node 4`, would run one process a rank, with the same losses.
