"""What the user changes on the model after wrapping counts in every copy of a stage, or is refused by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera import FxChimeraError
from fxchimera.runtime.settings import Settings
from tests.local.changing import BOTH, check
from tests.local.toys import WIDTH, Tanh, chain, data, plain, seeded, wrapped
from tests.parity import Outcome, assert_close, gradients_of


class Scaled(nn.Module):
    """A layer with settings in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tanh()
        self.act = nn.LeakyReLU(0.1)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.0
        self.table = torch.ones(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.body(x))) * self.scale * self.table


def scaled(closed: bool) -> nn.Module:
    model = seeded(lambda: nn.Sequential(*(Scaled() for _ in range(4))))
    for layer in model.children() if closed else ():
        layer.register_forward_hook(lambda *_: None)  # a module with hooks is recorded as one call
    return model


@BOTH
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("path", ["scale", "act.negative_slope", "drop.p"])
def test_an_attribute_that_changes_counts_in_both_copies(path: str, closed: bool, schedule: str) -> None:
    def change(model: Any) -> None:
        for layer in model:
            holder, _, name = path.rpartition(".")
            setattr(layer.get_submodule(holder), name, 1.0 if name == "p" else 0.7)

    check(lambda: scaled(closed), change, schedule)


def test_a_tensor_that_is_no_buffer_is_one_for_both_copies() -> None:
    check(lambda: scaled(closed=True), lambda model: [layer.table.fill_(3.0) for layer in model])


@BOTH
def test_module_hooks_may_come_and_go(schedule: str) -> None:
    def change(model: Any) -> None:
        for layer in model:
            layer.linear.register_forward_hook(lambda _m, _i, output: output * 2)
        model[0].linear.register_forward_hook(lambda _m, _i, output: output + 1).remove()

    check(lambda: chain(4), change, schedule)


def test_batch_norms_momentum_may_change() -> None:
    def build() -> Any:
        return seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))))

    def change(model: Any) -> None:
        for layer in model:
            layer[1].momentum = 0.7

    x, y = data(16)
    model, reference = build(), build()
    with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
        change(model)
        pipe.step(x, target=y)
    change(reference)
    for rows in x.split(4):
        reference(rows)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


def test_the_model_may_change_its_dtype() -> None:
    x, y = data(8)
    model = chain(4).float()
    with wrapped(model, x.float(), num_stages=4, n_microbatches=4) as pipe:
        pipe.step(x.float(), target=y.float())
        model.zero_grad()
        model.double()
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    model.zero_grad()
    assert_close(found, plain(model, lambda m: F.mse_loss(m(x), y)), 1e-12)


@pytest.mark.parametrize("kind", ["assign", "module", "new"])
def test_what_cannot_be_followed_is_refused_by_name(kind: str) -> None:
    x, y = data(8)
    model = chain(4)
    with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
        if kind == "assign":
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        elif kind == "module":
            model[2] = Tanh().double()
        else:
            model[2].register_parameter("extra", nn.Parameter(torch.zeros(1)))
        with pytest.raises(FxChimeraError, match=r"'0\.linear\.weight' is|module '2' is another|module '2' has 1 param|'2' has 2"):
            pipe.step(x, target=y)


def test_settings_are_looked_at_in_microseconds() -> None:
    """Every call looks at every module; the bar is far above what it costs (1.3 us a module) and far below a walk (15 us)."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Tanh()) for _ in range(500)))
    settings = Settings(model, {})
    first = settings.look()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert settings.look() is first
        times.append(time.perf_counter() - start)
    assert min(times) / len(list(model.modules())) < 8e-6
