"""The prediction that a stage's backward can be split, beside what the runtime does with the stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.runtime.stages.observation import Observation
from fxchimera_passes.capture import capture
from fxchimera_passes.splittable import splittable
from tests.graph.recorded import WIDTH


class Product(nn.Module):
    """``x`` times a weight, in the model's own forward; ``made`` does something to the weight before."""

    def __init__(self, made: Callable[[Tensor], Tensor] = lambda weight: weight) -> None:
        super().__init__()
        self.weight, self.made = nn.Parameter(torch.randn(WIDTH, WIDTH)), made

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.made(self.weight)


class Scaled(nn.Module):
    """Reads its parameter in no operator of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[None])[0][0]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def with_bias(module: nn.Linear) -> nn.Linear:
    module.weight.requires_grad_(False)
    return module


STAGES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), True),
    "block": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0), True),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), True),
    "product": (Product, True),
    "product with what is made of it": (lambda: Product(lambda weight: weight.t() * 2), True),
    "frozen": (lambda: frozen(nn.Linear(WIDTH, WIDTH)), False),
    "bias alone": (lambda: with_bias(nn.Linear(WIDTH, WIDTH)), False),
    "norm": (lambda: nn.LayerNorm(WIDTH), False),
    "norm of matrices": (lambda: nn.LayerNorm((3, WIDTH)), False),
    "scale": (Scaled, False),
    "recurrent": (Recurrent, False),
    "no parameters": (nn.Tanh, False),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_prediction_is_what_the_runtime_can_put_off(name: str) -> None:
    """The second stage of three; the first and the last can always be split."""
    build, expected = STAGES[name]
    middle = build()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))
    x = torch.randn(3, WIDTH)
    captured = capture(model, (x,), {}, num_stages=3)
    of_middle = [node.name for node in captured.graph.nodes if node.target not in ("0", "2")]
    assert splittable(captured, of_middle) is expected
    with Observation() as seen:
        output = middle(x.requires_grad_() * 1)
    assert bool(seen.allowed([output], middle.parameters())) is expected


def test_sparse_and_scripted_and_compiled() -> None:
    ids = torch.tensor([0, 2, 1])
    for embedding, expected in ((nn.Embedding(3, WIDTH), True), (nn.Embedding(3, WIDTH, sparse=True), False)):
        captured = capture(nn.Sequential(embedding, nn.Tanh()), (ids,), {}, num_stages=1)
        assert splittable(captured, [node.name for node in captured.graph.nodes]) is expected
    hidden = nn.Linear(WIDTH, WIDTH)
    hidden.compile(backend="eager")
    captured = capture(nn.Sequential(hidden, nn.Tanh()), (torch.randn(3, WIDTH),), {}, num_stages=1)
    assert not splittable(captured, [node.name for node in captured.graph.nodes])


def test_a_region_without_gradients() -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.layer(x)
            return F.relu(x) - target

    captured = capture(Still(), (torch.randn(3, WIDTH),), {}, num_stages=2)
    assert not splittable(captured, [node.name for node in captured.graph.nodes])
