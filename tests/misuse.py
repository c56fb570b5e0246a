"""The mistakes of users that set the ranks of a job apart, each as a function that every process runs and that must raise on all.

Inside gloo several of these would end a process with SIGABRT, or hand garbage over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests import found, workers
from tests.local.toys import chain, data, wrapped
from tests.workers import Caught, caught, rank

__all__ = ["MISUSE", "OF_BATCHES", "OF_MODELS", "WAIT_SECONDS", "calls", "differ_at_wrap", "differ_in_a_microbatch"]

WAIT_SECONDS = 3.0


def differ_at_wrap(kind: str) -> Caught:
    """Rank 1 makes its pipeline with another argument, or of another model."""
    x, _ = data(8)
    odd = rank() == 1
    options: dict[str, Any] = {"num_stages": 2, "n_microbatches": 4, "schedule": "1f1b"}
    changed: dict[str, Any] = {
        "schedule": {"schedule": "gpipe"},
        "n_microbatches": {"n_microbatches": 2},
        "nan": {"nan": "skip"},
        "batch_norm": {"batch_norm": "deferred"},
    }
    model = chain(6 if odd and kind == "layers" else 4, 7 if odd and kind == "width" else 6)
    x = torch.cat([x, x[:, :1]], 1) if odd and kind == "width" else x
    return caught(lambda: wrapped(model, x, **{**options, **(changed.get(kind, {}) if odd else {})}))


def differ_in_a_microbatch(kind: str) -> Caught:
    """In one micro-batch of the second step a hook of the user's on rank 0 returns what the recording did not see."""
    x, y = data(8)
    model, calls = chain(4), [0]
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "rows": lambda output: output[:1],
        "width": lambda output: output[:, :3],
        "dtype": lambda output: output.float(),
        "dimensions": lambda output: output[None],
    }

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
        calls[0] += rank() == 0
        return changes[kind](output) if calls[0] == 7 else output

    model[1].register_forward_hook(hook)
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b", split_points=["2"], wait_seconds=20.0) as pipe:
        calls[0] = 0
        pipe.step(x, target=y)
        return caught(lambda: pipe.step(x, target=y))


def calls(kind: str) -> Caught:
    """Rank 1 makes a call less, or one more, than the others."""
    x, y = data(8)
    pipe = wrapped(chain(4), x, num_stages=2, n_microbatches=4, schedule="1f1b", wait_seconds=WAIT_SECONDS)

    def rest() -> None:
        if rank() == 1 and kind == "missing":
            time.sleep(2 * WAIT_SECONDS)  # at something else
            pipe.step(x, target=y)
        elif rank() == 1 or kind == "missing":
            pipe.step(x, target=y)
        else:
            pipe.evaluate(x, target=y)

    try:
        pipe.step(x, target=y)
        return caught(rest)
    finally:
        pipe.close()


OF_BATCHES = ("rows", "width", "dtype", "dimensions")
OF_MODELS = ("layers", "width", "schedule", "n_microbatches", "nan", "batch_norm")
# name -> what every rank runs, and its arguments
MISUSE: dict[str, tuple[Callable[..., Caught], tuple[Any, ...]]] = {
    **{f"a batch of other {kind}": (workers.differ_in_batch, (kind,)) for kind in ("rows", "width", "dtype", "too few rows")},
    **{
        f"a step that differs in {kind}": (found.differ, (kind,))
        for kind in ("values", "loss_scale", "mode", "no_sync", "input gradients")
    },
    **{f"a micro-batch of other {kind}": (differ_in_a_microbatch, (kind,)) for kind in OF_BATCHES},
    **{f"a pipeline of other {kind}": (differ_at_wrap, (kind,)) for kind in OF_MODELS},
    "step and evaluate": (workers.call_differently, ()),
    "step and clip": (found.different_calls, ()),
    "a missing call": (calls, ("missing",)),
    "an extra call": (calls, ("extra",)),
}
