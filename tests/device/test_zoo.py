"""Models of transformers and awkward ones on two devices, under vector clocks, against the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.device.twin import DEVICES
from tests.local.wrapped import step, wrap
from tests.models import Example, bert, gpt2, masked_rotary, mlp, nn_transformer, resnet, skip, tied, vit
from tests.parity import Outcome, assert_close
from tests.zoo_sample import SAMPLE

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("build", [mlp, gpt2, bert, vit, nn_transformer, resnet, skip, masked_rotary, tied])
@pytest.mark.parametrize("schedule", ["chimera", "zbv"])
def test_models(build, schedule):
    compare(lambda: build(batch=8, dropout=0.1, dtype=torch.float64), 4, 4, schedule)


@pytest.mark.parametrize("name", SAMPLE)
def test_awkward_models(name):
    compare(SAMPLE[name], 2, 2, "1f1b")


def compare(make: Callable[[], Example], stages: int, n: int, schedule: str) -> None:
    """Two steps on either; gradients add up."""
    found = []
    torch.ops.twin.check(True)
    for devices in ([DEVICES[rank % 2] for rank in range(stages)], "cpu"):
        example = make()
        with wrap(example, stages, n, schedule, devices=devices) as pipe:
            step(pipe, example)
            found.append(step(pipe, example))
    assert not torch.ops.twin.faults()
    torch.ops.twin.check(False)
    there = {name: None if gradient is None else gradient.cpu() for name, gradient in found[0].gradients.items()}
    assert_close(Outcome(found[0].loss, there), found[1], 1e-9)
