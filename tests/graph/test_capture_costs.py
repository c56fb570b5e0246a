"""What a recording counts, and the mistakes of a user that it names."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxchimera_passes.capture import capture
from fxchimera_passes.captured import info
from fxchimera_passes.errors import CaptureError
from tests.graph.recorded import WIDTH, Two, build, data, find


def test_a_model_that_fails_by_itself_says_so():
    class Model(Two):
        def between(self, x):
            return x @ torch.ones(7, 2, dtype=x.dtype)

    with pytest.raises(CaptureError, match=r"test_capture_costs\.py:\d+: it raised RuntimeError"):
        capture(build(Model), (data(),), {})


def test_lazy_parameters_and_backward_hooks_on_the_root_are_refused():
    with pytest.raises(CaptureError, match="run one forward"):
        capture(nn.Sequential(nn.LazyLinear(3)), (data(),), {})
    model = build(Two)
    model.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(CaptureError, match="backward hooks"):
        capture(model, (data(),), {})


def test_flops_and_bytes_of_a_linear_layer():
    captured = capture(build(lambda: nn.Sequential(nn.Linear(WIDTH, 6))), (data(),), {})
    (node,) = find(captured, "0")
    assert info(node).forward_flops == 2 * 3 * WIDTH * 6
    assert info(node).moved_bytes == 8 * (3 * WIDTH + WIDTH * 6 + 6 + 3 * 6)


def test_flops_of_attention_on_a_cpu():
    class Model(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    captured = capture(Model(), (q, k), {})
    (node,) = find(captured, F.scaled_dot_product_attention)
    assert info(node).forward_flops == 2 * 2 * 3 * (5 * 7 * 4) * 2
    assert math.prod(info(node).value.shape) == q.numel()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this host has a device besides the CPU")
def test_a_device_that_this_host_lacks_is_refused():
    with pytest.raises(CaptureError, match="recorded for cuda: this host has only cpu"):
        capture(build(Two).to("meta"), (data(),), {}, device=torch.device("cuda"))
