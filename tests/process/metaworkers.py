"""What the ranks do with models built on the meta device."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import fxchimera
from tests.metamodels import Mixed, llama, on_meta, tokens

__all__ = ["left_alive", "resident", "train_meta", "wrap_large"]


def train_meta(stages: int, schedule: str, folder: Path | None) -> dict[str, Any]:
    """Three optimizer steps of a tied Llama from the meta device; what was on this rank after wrapping, losses, and the state."""
    model, x = on_meta(llama, tied=True).train(), tokens()
    batch = {"input_ids": x, "labels": x}
    with fxchimera.pipeline(
        model, example_kwargs=batch, num_stages=stages, n_microbatches=4, schedule=schedule, checkpoint=folder, seed=3
    ) as pipe:
        real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
        owned = [name for name, _ in pipe.named_parameters()]
        buffers = all(not buffer.is_meta for buffer in model.buffers())
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        start = pipe.state_dict()
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses: list[Tensor] = []
        for _ in range(3):
            losses.append(pipe.step(**batch))
            optimizer.step()
            optimizer.zero_grad()
        evaluated = pipe.evaluate(**{key: value[:5] for key, value in batch.items()})  # recorded anew, with weights away
        return {
            "real": real, "owned": owned, "buffers": buffers, "tied": tied, "start": start, "losses": losses,
            "evaluated": evaluated, "state": pipe.state_dict(),
        }  # fmt: skip


def left_alive(schedule: str) -> tuple[list[str], list[str]]:
    """Wrap models made with weights; returns the parameters that another rank owns, and those of them that are still in memory."""
    away, alive = [], []
    x = tokens()
    for model in (llama(tied=True), Mixed()):
        model.train()
        batch = {"input_ids": x, "labels": x} if isinstance(model, PreTrainedModel) else {"x": x}
        parameters = {name: (weakref.ref(p), weakref.ref(p.untyped_storage())) for name, p in model.named_parameters()}
        pipe = fxchimera.pipeline(
            model, example_kwargs=batch, loss_fn=None if "labels" in batch else torch.mean, num_stages=4, n_microbatches=4,
            schedule=schedule,
        )  # fmt: skip
        gc.collect()
        owned = {name for name, _ in pipe.named_parameters()}
        away += [name for name in parameters if name not in owned]
        alive += [name for name in parameters if name not in owned and any(ref() is not None for ref in parameters[name])]
        pipe.close()
    return away, alive


def resident(key: str) -> int:
    """Bytes of this process: VmRSS at present, VmHWM at most since the last call for it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    if key == "VmHWM":
        Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


def wrap_large(folder: Path | None, width: int, layers: int) -> tuple[int, int]:
    """Wrap a larger Llama from the meta device; returns the model's bytes, and by how many this rank grew at most."""
    train_meta(4, "1f1b", None)  # loads what every pipeline needs, whatever its size
    model, x = on_meta(llama, tied=False, width=width, layers=layers).train(), tokens()
    batch = {"input_ids": x, "labels": x}
    resident("VmHWM")
    base = resident("VmRSS")
    with fxchimera.pipeline(
        model, example_kwargs=batch, num_stages=4, n_microbatches=4, schedule="1f1b", checkpoint=folder, seed=3
    ):
        return sum(p.nbytes for p in model.parameters()), resident("VmHWM") - base
