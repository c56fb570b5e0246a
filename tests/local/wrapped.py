"""Short ways to wrap an example of the zoo and to step it."""

from __future__ import annotations

from typing import Any

import fxchimera
from fxchimera import Pipeline
from tests.models import Example
from tests.parity import Outcome, gradients_of

__all__ = ["reference", "step", "wrap"]


def wrap(example: Example, stages: int, n: int, schedule: str = "chimera", **options: Any) -> Pipeline:
    """Wrap the example's model, with its own batch as the example batch."""
    return fxchimera.pipeline(
        example.model, example_args=example.args, example_kwargs=example.kwargs, loss_fn=example.loss_fn, num_stages=stages,
        n_microbatches=n, schedule=schedule, **{"seed": 7, **options},
    )  # fmt: skip


def step(pipe: Pipeline, example: Example, **options: Any) -> Outcome:
    """One step on the example's batch; the gradients are read off the user's model."""
    loss = pipe.step(*example.args, target=example.target, **options, **example.kwargs)
    return Outcome(loss, gradients_of(example.model))


def reference(example: Example, stages: int, n: int, schedule: str = "chimera", **options: Any) -> Outcome:
    """The plain model under the pipeline's randomness and association of sums."""
    result = fxchimera.reference(
        example.model, *example.args, target=example.target, loss_fn=example.loss_fn, num_stages=stages, n_microbatches=n,
        schedule=schedule, **{"seed": 7, **options}, **example.kwargs,
    )  # fmt: skip
    return Outcome(result.loss, result.gradients)
