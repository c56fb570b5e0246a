"""What a run of the demo leaves on disk: the loss curve with every digit, a summary, and the model as transformers loads it."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Curve", "Summary", "write_curve", "write_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Loss (nats a token) and learning rate of every step."""

    losses: tuple[float, ...]
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The held-out loss, the unigram line it has to beat (both nats a token), and the seconds from start to held-out loss."""

    held_out_loss: float
    unigram_nats: float
    seconds: float


def write_curve(folder: Path, curve: Curve, summary: Summary) -> None:
    """Write ``loss.csv`` (step, loss, learning rate; floats in full) and ``summary.json``."""
    with (folder / "loss.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "loss", "learning_rate"])
        for step, (loss, rate) in enumerate(zip(curve.losses, curve.learning_rates, strict=True), start=1):
            table.writerow([step, repr(loss), repr(rate)])
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")


def write_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a transformers model and its tokenizer; ``GPT2LMHeadModel.from_pretrained(folder)`` reads the model back."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
