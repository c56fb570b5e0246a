"""Pipelines of threads that are made and closed leave no threads, no open files and no memory behind."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch.nn.functional as F

import fxchimera
from tests.cycles import cycles
from tests.local.toys import WIDTH, chain, data, seeded

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the system has no /proc")


@pytest.mark.parametrize(("count", "most_bytes"), [(5, 5e6), pytest.param(100, 5e6, marks=pytest.mark.torture)])
def test_nothing_is_left(count: int, most_bytes: float) -> None:
    left = cycles(count, 4, "chimera")
    assert (left.threads, left.files) == ((), ())
    assert left.resident < most_bytes


def test_a_model_that_nobody_wants_any_more_is_freed() -> None:
    """Autograd's graph of a recording is out of sight of Python's garbage collector, and must not lead back to the model."""
    x, target = data(8, WIDTH)
    model = seeded(lambda: chain(4))
    gone = [weakref.ref(module) for module in model.modules()]
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=F.mse_loss, num_stages=2, n_microbatches=4, recompute="selective"
    ) as pipe:
        pipe.step(x, target=target)
    del model, pipe
    gc.collect()
    assert [module() for module in gone] == [None] * len(gone)
