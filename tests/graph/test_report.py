"""The report of a model in which everything worth telling happens once, at a line that the test looks up in the source."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.report import Explanation, explain
from fxchimera_passes.stages import make_plan
from tests.graph.recorded import WIDTH, Branch, build, data

OFFSETS = np.arange(WIDTH, dtype=np.float64)


@dataclass
class Options:
    factor: float = 2.0
    mask: Tensor | None = None


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(WIDTH, WIDTH), Branch(), nn.Linear(WIDTH, WIDTH)
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(()))

    def forward(self, x: Tensor, options: Options, lengths: Tensor, *, double: bool = False, name: str = "plain") -> Tensor:
        longest = int(lengths.max())  # guard
        places = torch.arange(longest, dtype=x.dtype) + lengths[:1]  # recomputed
        x = self.first(x) * options.factor + torch.from_numpy(OFFSETS)  # constant
        x = x + places.sum()
        low, high = x.split(WIDTH // 2, 1)  # a tuple
        x = torch.cat([high, low], 1)
        self.counts.add_(1)  # a buffer
        x = self.branch(x) * self.counts
        return self.last(x) + places.sum() * (2 if double else 1)


def line(comment: str) -> str:
    source, first = inspect.getsourcelines(Told.forward)
    (place,) = [number for number, text in enumerate(source, first) if text.rstrip().endswith(f"# {comment}")]
    return f"{__file__}:{place}"


def explained(num_stages: int = 2) -> Explanation:
    args = (data(), Options(), torch.tensor([1, 3, 2]))
    captured = capture(build(Told), args, {"double": True}, num_stages=8, closed=["branch"])
    return explain(captured, make_plan(captured, analytic(captured), num_stages))


def test_what_the_recording_holds_for() -> None:
    report = explained()
    (guard,) = [guard for guard in report.guards if guard.line == line("guard")]
    assert guard.expected == 3
    values = {"args[1].factor": 2.0, "args[1].mask": None, "double": True}
    assert report.arguments == values, "lengths and x are tensors; name= was not passed"


def test_constants_are_told_with_their_place() -> None:
    (constant,) = explained().constants
    assert (constant.description, constant.line) == ("tensor float64[4] read in the model", line("constant"))


def test_pinned_ranges_have_nodes_lines_and_reasons() -> None:
    report = explained()
    reasons = {pinned.reason: pinned for pinned in report.pinned}
    split = next(pinned for reason, pinned in reasons.items() if reason == "split gives a value that is no tensor")
    assert split.lines[0] == line("a tuple")
    assert split.count == 3, "the split and its two halves"


def test_recomputed_nodes_are_those_that_need_inputs_only_and_are_read_on_both_sides() -> None:
    again = explained(2).recomputed
    assert set(again.values()) == {(0, 1)}
    assert "arange" in again
    assert not explained(1).recomputed


def test_modules_are_told_with_reasons() -> None:
    report = explained()
    assert set(report.opened) == {""}
    assert report.closed == {"branch": "asked for"}


def test_the_text_has_all_of_it() -> None:
    text = str(explained())
    for wanted in (
        "kept whole\n  branch: asked for",
        f"int() in Told is 3  ({line('guard')})",
        "args[1].factor = 2.0",
        f"tensor float64[4] read in the model  ({line('constant')})",
        "split gives a value that is no tensor",
        "stages 0, 1: arange",
    ):
        assert wanted in text, text
    assert max(map(len, text.splitlines())) < 250


def test_long_lists_are_cut_and_likes_are_one_line() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(30))

        def forward(self, x: Tensor, **flags: Any) -> Tensor:
            for layer in self.layers:
                low, high = layer(x).split(2, 1)
                x = torch.cat([high, low], 1)
            return x

    captured = capture(build(Deep), (data(),), {f"flag_{i}": i for i in range(20)}, num_stages=8)
    text = str(explain(captured, make_plan(captured, analytic(captured), 2)))
    assert "flag_11 = 11\n  and 8 more" in text
    assert "and 29 more like it" in text
    assert len(text.splitlines()) < 40
