"""Modules around a split point are opened; where that cannot be, the name and the reason are given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture, recapture
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.stages import make_plan
from tests.graph.recorded import WIDTH, Branch, assert_same, build, data


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.inner(x)


class Deep(nn.Module):
    """Blocks in a list that is never called itself; light enough to stay whole for two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(16))
        self.blocks[7] = Branch()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("point", "opened"), [("blocks.3.inner", {"blocks.3"}), ("blocks.3.inner.1", {"blocks.3", "blocks.3.inner"})]
)
def test_what_is_around_a_split_point_is_opened(point, opened):
    model = build(Deep)
    assert capture(model, (data(),), {}, num_stages=2).open_modules == {""}
    captured = capture(model, (data(),), {}, num_stages=2, opened=[point])
    assert captured.open_modules == {"", *opened}
    assert all(point in captured.report.opened[name] for name in opened)
    assert_same(captured, data())
    plan = make_plan(captured, analytic(captured), 2, split_points=[point])
    assert "blocks.4.first.weight" in plan.stages[1].owned
    assert "blocks.3.first.weight" in plan.stages[0].owned
    assert recapture(captured, (data(5),), {}, training=True).open_modules == captured.open_modules


@pytest.mark.parametrize("point", ["blocks", "blocks.3"])
def test_nothing_is_opened_for_a_module_that_the_root_calls(point):
    assert capture(build(Deep), (data(),), {}, num_stages=2, opened=[point]).open_modules == {""}


def test_a_module_that_another_branch_of_the_tree_calls():
    class Borrower(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.own, self.lender = nn.Linear(WIDTH, WIDTH), [lender]

        def forward(self, x):
            return self.lender[0].inner(self.own(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lender = Block()
            self.borrower = Borrower(self.lender)

        def forward(self, x):
            return self.borrower(x)

    captured = capture(build(Model), (data(),), {}, opened=["lender.inner"])
    assert captured.open_modules == {"", "borrower"}


def hooked(model):
    model.blocks[3].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    ("change", "closed", "point", "message"),
    [
        (None, (), "blocks.3.iner", r"'blocks\.3\.iner' is not a module.*did you mean 'blocks\.3\.inner'"),
        (hooked, (), "blocks.3.inner", r"inside 'blocks\.3' \(Block\), which has to stay one call: it has hooks"),
        (None, ("blocks.3",), "blocks.3.inner", r"inside 'blocks\.3' \(Block\).*asked for"),
        (None, (), "blocks.7.layer", r"inside 'blocks\.7' \(Branch\).*depends on .*recorded\.py:\d+"),
    ],
)
def test_a_split_point_that_cannot_be_is_named(change, closed, point, message):
    model = build(Deep)
    if change is not None:
        change(model)
    with pytest.raises(PartitionError, match=message):
        capture(model, (data(),), {}, num_stages=2, closed=closed, opened=[point])
    assert torch.is_grad_enabled()
