"""How much of a backward is for weights that can wait: by hand for single layers, and as the runtime finds it for whole ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.planner.link import Measures
from fxchimera.planner.measured import calibrated
from fxchimera.runtime.stages.deferral import Deferral
from fxchimera.schedule.measurement import StageTimes
from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.deferrable import with_deferrable
from fxchimera_passes.stages import make_plan


class Product(nn.Module):
    """A layer of the user's own, with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Scaled(nn.Module):
    """Scales by a vector: no operator here can wait."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x * self.scale, (8,))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "product": Product,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "lstm": Last,
    "norm": lambda: nn.LayerNorm(8),
    "scaled": Scaled,
    "frozen": lambda: frozen(nn.Linear(8, 8)),
    "convolution": lambda: nn.Conv1d(4, 4, 3, padding=1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_can_wait_is_what_the_runtime_puts_off(name):
    """The layer between two linears; the runtime's own mode tells whether an operator in it waits."""
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(2, 4, 8)
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
    captured = capture(model, (x,), {}, closed=["1"] if name != "linear" else [])
    costs = with_deferrable(captured, analytic(captured))
    (node,) = [node for node in captured.graph.nodes if node.op == "call_module" and node.target == "1"]
    with Deferral(frozenset(map(id, layer.parameters()))) as mode:
        layer(x.clone().requires_grad_())
    share = costs.deferrable.get(node.name, 0.0) / costs.backward[node.name]
    assert share == (0.5 if mode.parameters else 0.0)


def test_stages_add_up_what_can_wait():
    """The first linear reads data: its whole backward is for its weights.  A stage without weights of that kind has none."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    captured = capture(model, (torch.randn(2, 8),), {})
    costs = with_deferrable(captured, analytic(captured))
    stages = make_plan(captured, costs, 3, split_points=["2", "4"]).stages
    backward = list(costs.backward.values())
    wanted = [backward[0], 0.0, backward[4] / 2]
    assert [stage.deferrable_seconds for stage in stages] == pytest.approx(wanted)
    assert all(stage.backward_seconds > later for stage, later in zip(stages, wanted, strict=True))


def test_halves_of_a_backward():
    """What a split adds goes to both halves by their shares; where nothing can wait there is nothing to pay."""
    known = Measures(split_price=0.1, input_share=0.25, split_forward=0.5)
    assert known.halves(2.0, 4.0) == pytest.approx((0.25 * 5.4, 0.75 * 5.4))
    assert known.halves(2.0, 4.0, 1.0) == pytest.approx((0.75 * 5.4, 0.25 * 5.4))
    assert known.halves(2.0, 4.0, 0.0) == (4.0, 0.0)
    assert math.isclose(sum(known.halves(0.0, 4.0)), 4.4)


def test_a_measured_w_is_shared_out_over_the_weights():
    """I 3 s and W 1 s: a quarter of the 2 s of a whole backward can wait, in the nodes of which something can, as before."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Tanh())
    captured = capture(model, (torch.randn(2, 8),), {})
    costs = with_deferrable(captured, analytic(captured))
    cut = make_plan(captured, costs, 2, split_points=["4"])
    took = StageTimes(forward=1.0, split_forward=1.0, backward=2.0, input_grad=3.0, weight_grad=1.0)
    again = calibrated(cut, costs, [took, took])
    stages = make_plan(captured, again, 2, split_points=["4"]).stages
    assert [stage.backward_seconds for stage in stages] == pytest.approx([2.0, 2.0])
    assert [stage.deferrable_seconds for stage in stages] == pytest.approx([0.5, 0.0])
    first, second = (again.deferrable[name] for name in costs.deferrable if costs.deferrable[name])
    before = list(costs.deferrable.values())
    assert first / second == pytest.approx(before[0] / before[1])
