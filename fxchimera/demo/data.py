"""The text of the demo: the Python language reference that lies inside every CPython, cut into byte-pair tokens.

``pydoc_data.topics`` holds about half a megabyte of English; its topics quote each other, so every paragraph is kept once.  The
last tenth is held out: no paragraph of it was seen in training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxchimera.errors import FxChimeraError

__all__ = ["Corpus", "batches", "make_corpus", "python_reference", "unigram_nats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A tokenized text.

    ``train`` is [tokens]; ``held_out`` is [rows, seq]; ``unigram_nats`` is what a model that knows only how often each token
    occurs in the training part would score on the held-out part, in nats a token: the line that a language model has to beat.
    """

    tokenizer: Any
    train: Tensor
    held_out: Tensor
    unigram_nats: float


def python_reference() -> str:
    """Return the text of CPython's ``pydoc_data.topics``, each paragraph once.

    Raises:
        FxChimeraError: This Python was packaged without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FxChimeraError("this Python lacks pydoc_data.topics, the text that the demo trains on; use a full CPython") from error
    paragraphs: dict[str, str] = {}
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    return "\n\n".join(paragraph for key, paragraph in paragraphs.items() if key)


def make_corpus(text: str, *, vocab_size: int, seq: int, held_out_share: float = 0.1) -> Corpus:
    """Train byte-level byte-pair encoding on the first part of a text and encode both parts with it.

    Raises:
        FxChimeraError: The held-out part is shorter than one row of ``seq`` tokens.
    """
    from tokenizers import ByteLevelBPETokenizer

    cut = int(len(text) * (1 - held_out_share))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text[:cut]], vocab_size=vocab_size, min_frequency=2, show_progress=False)
    train = torch.tensor(tokenizer.encode(text[:cut]).ids)
    held_out = torch.tensor(tokenizer.encode(text[cut:]).ids)
    rows = len(held_out) // seq
    if rows == 0:
        raise FxChimeraError(f"the held-out part has {len(held_out)} tokens, less than one row of {seq}; use a shorter sequence")
    held_out = held_out[: rows * seq].view(rows, seq)
    scored = held_out[:, 1:]  # a model that predicts the next token is not scored on the first of a row
    return Corpus(tokenizer=tokenizer, train=train, held_out=held_out, unigram_nats=unigram_nats(train, scored, vocab_size))


def unigram_nats(train: Tensor, scored: Tensor, vocab_size: int) -> float:
    """Return the cross entropy of ``scored`` under the token frequencies of ``train`` (each count plus one), in nats a token.

    >>> round(unigram_nats(torch.tensor([0, 0, 1]), torch.tensor([1]), 2), 6) == round(-torch.tensor(2 / 5).log().item(), 6)
    True
    """
    counts = torch.bincount(train, minlength=vocab_size).double() + 1
    return float(-(counts / counts.sum()).log()[scored].mean())


def batches(train: Tensor, *, rows: int, seq: int, seed: int) -> Iterator[Tensor]:
    """Yield batches [rows, seq] of random windows for ever; the same ones on every rank and in every run of a seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(train) - seq, (rows,), generator=generator)
        yield torch.stack([train[start : start + seq] for start in starts])
