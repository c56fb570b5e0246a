"""The model of the demo, a GPT-2 of transformers with random weights, and its recipe; nothing here knows of pipelines."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from fxchimera.errors import FxChimeraError

__all__ = ["learning_rate", "make_gpt2", "sample", "warmup_cosine"]

_HEAD_WIDTH = 32


def make_gpt2(*, vocab_size: int, layers: int, width: int, seq: int, seed: int) -> nn.Module:
    """Return a ``GPT2LMHeadModel`` with random weights, tied embedding and head, and dropout 0.1.

    Raises:
        FxChimeraError: The width is not a multiple of an attention head's.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    logging: Any = importlib.import_module("transformers.utils.logging")  # its functions carry no types
    logging.set_verbosity_error()  # it warns of a config's own default, loss_type
    logging.disable_progress_bar()
    if width % _HEAD_WIDTH:
        raise FxChimeraError(f"--width {width} is not a multiple of {_HEAD_WIDTH}, the width of an attention head")
    torch.manual_seed(seed)
    heads = width // _HEAD_WIDTH
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=seq, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def learning_rate(width: int) -> float:
    """Return the peak learning rate for a width; narrower models bear more."""
    return 0.5 / width


def warmup_cosine(step: int, *, steps: int) -> float:
    """Return the factor of the learning rate at a step: linear warm-up over a tenth of the run, then cosine decay to a tenth.

    >>> [round(warmup_cosine(s, steps=100), 3) for s in (0, 9, 55, 100)]
    [0.1, 1.0, 0.55, 0.1]
    """
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def sample(model: Any, prompt: Tensor, *, length: int, seed: int) -> Tensor:
    """Continue a prompt [tokens] to ``length`` tokens, each drawn from the 20 likeliest; the caller's generator is left alone."""
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], max_length=length, do_sample=True, top_k=20, pad_token_id=0
        )
    first: Tensor = tokens[0]
    return first
