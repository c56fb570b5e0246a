"""Markers in the forward, and torch's ``SplitPoint``: the model is cut there and trains as before; what cannot be cut is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipe_split

import fxchimera
from fxchimera.errors import PartitionError
from tests.parity import TOLERANCE, Outcome, assert_close, gradients_of

MARKERS = [fxchimera.split, pipe_split]


class Block(nn.Module):
    def __init__(self, mark: Callable[[], None] | None) -> None:
        super().__init__()
        self.up, self.down, self.mark = nn.Linear(8, 16), nn.Linear(16, 8), mark

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x))
        if self.mark is not None:
            self.mark()
        return x + self.down(y)


class Marked(nn.Module):
    """Four blocks; a marker inside block 1, and one between blocks 2 and 3."""

    def __init__(self, mark: Callable[[], None], *, inside: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(mark if inside and number == 1 else None) for number in range(4)])
        self.mark = mark

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 3:
                self.mark()
            x = block(x)
        return x


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator).double(), torch.randn(6, 8, generator=generator).double()


def owned(pipe: fxchimera.Pipeline) -> list[set[str]]:
    return [set(stage.owned) for stage in pipe.plan.stages]


def assert_trains(model: nn.Module, twin: nn.Module, pipe: fxchimera.Pipeline) -> None:
    x, y = batch()
    loss = pipe.step(x, target=y)
    expected = F.mse_loss(twin(x), y)
    expected.backward()
    assert_close(Outcome(loss, gradients_of(model)), Outcome(expected.detach(), gradients_of(twin)), TOLERANCE[torch.float64])


@pytest.mark.parametrize("mark", MARKERS)
@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_the_model_is_cut_at_its_markers(mark: Callable[[], None], schedule: str) -> None:
    model, twin = (made(lambda: Marked(mark)) for _ in range(2))
    x, _ = batch()
    options = {"loss_fn": F.mse_loss, "num_stages": 3, "n_microbatches": 3, "schedule": schedule}
    with fxchimera.pipeline(model, example_args=(x,), **options) as pipe:
        assert owned(pipe) == [
            {f"blocks.{name}.{kind}" for name in ("0.up", "0.down", "1.up") for kind in ("weight", "bias")},
            {f"blocks.{name}.{kind}" for name in ("1.down", "2.up", "2.down") for kind in ("weight", "bias")},
            {f"blocks.{name}.{kind}" for name in ("3.up", "3.down") for kind in ("weight", "bias")},
        ]
        assert_trains(model, twin, pipe)


def test_chimera_trains_between_markers_for_other_batches_too() -> None:
    model, twin = (made(lambda: Marked(fxchimera.split, inside=False)) for _ in range(2))
    x, y = batch()
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=F.mse_loss, num_stages=2, n_microbatches=2, schedule="chimera"
    ) as pipe:
        assert owned(pipe)[1] == {f"blocks.3.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
        assert_trains(model, twin, pipe)
        model.zero_grad()
        twin.zero_grad()
        pipe.step(x[:3], target=y[:3])
        F.mse_loss(twin(x[:3]), y[:3]).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(twin))


@pytest.mark.parametrize(("end", "begins"), [("blocks.1", "blocks.2"), ("blocks.0.up", "blocks.0.down"), ("norm", "head")])
def test_split_point_end_cuts_after_the_module(end: str, begins: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(None), Block(None), Block(None))
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.blocks(x)))

    x, _ = batch()
    found = []
    for points in ({end: SplitPoint.END}, {begins: SplitPoint.BEGINNING}, [begins]):
        model, twin = made(Plain), made(Plain)
        with fxchimera.pipeline(
            model, example_args=(x,), loss_fn=F.mse_loss, num_stages=2, n_microbatches=2, split_points=points
        ) as pipe:
            found.append(owned(pipe))
            assert_trains(model, twin, pipe)
    assert found[0] == found[1] == found[2]


def test_the_end_of_a_module_that_returns_several_tensors_is_after_all_of_them() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out, (state, _) = self.rnn(x.unsqueeze(1))
            return self.head(out.squeeze(1) + state[0])

    x, _ = batch()
    model, twin = made(Twice), made(Twice)
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=F.mse_loss, num_stages=2, n_microbatches=2, split_points={"rnn": SplitPoint.END}
    ) as pipe:
        assert owned(pipe)[1] == {"head.weight", "head.bias"}
        assert_trains(model, twin, pipe)


def test_split_points_count_for_more_than_markers() -> None:
    x, _ = batch()
    model = made(lambda: Marked(fxchimera.split))
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=F.mse_loss, num_stages=2, n_microbatches=2, split_points=["blocks.2"]
    ) as pipe:
        assert owned(pipe)[0] == {name for name, _ in model.named_parameters() if name.startswith(("blocks.0", "blocks.1"))}


def test_markers_do_nothing_with_one_stage_and_in_a_plain_run() -> None:
    model, twin = (made(lambda: Marked(fxchimera.split)) for _ in range(2))
    x, _ = batch()
    with fxchimera.pipeline(model, example_args=(x,), loss_fn=F.mse_loss, num_stages=1, n_microbatches=2) as pipe:
        assert_trains(model, twin, pipe)


def line_of(function: Callable[..., object], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


class Ends(nn.Module):
    """Marked where there is nothing to part."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.one, self.two, self.first = nn.Linear(8, 8), nn.Linear(8, 8), first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            fxchimera.split()
        y = self.two(self.one(x))
        if not self.first:
            fxchimera.split()
        return y


class Hidden(nn.Module):
    """A marker in a module with a hook, which stays one call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), Block(fxchimera.split)
        self.two.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


INSIDE = line_of(Block.forward, "self.mark()")
BETWEEN = line_of(Marked.forward, "self.mark()")


@pytest.mark.parametrize(
    ("build", "stages", "message"),
    [
        (lambda: Marked(fxchimera.split), 2, rf"has 2 split markers \(\S+:{INSIDE}, \S+:{BETWEEN}\), 2 stages need 1"),
        (lambda: Marked(fxchimera.split), 4, "has 2 split markers .*, 4 stages need 3"),
        (lambda: Ends(first=True), 2, "the marker at .* is where the forward begins: stage 0 would be empty"),
        (lambda: Ends(first=False), 2, "comes after the marker at .*: the last stage would be empty"),
        (Hidden, 2, rf"marker at \S+:{INSIDE} lies inside two \(Block\), which stays one call: it has hooks\."),
    ],
)
def test_markers_that_cannot_be_used_are_refused_with_their_line(build: Callable[[], nn.Module], stages: int, message: str) -> None:
    x, _ = batch()
    with pytest.raises(PartitionError, match=message):
        fxchimera.pipeline(made(build), example_args=(x,), loss_fn=F.mse_loss, num_stages=stages, n_microbatches=2, schedule="1f1b")


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("blocks.1", r"split_points is the text 'blocks.1'; write a list of names: \['blocks.1'\]"),
        ({"blocks.1": "end"}, r"split_points\['blocks.1'\] is 'end'; it must be SplitPoint.BEGINNING or SplitPoint.END"),
        ({"blocks.3": SplitPoint.END}, "comes after the end of 'blocks.3': the last stage would be empty"),
        ({"blocks.7": SplitPoint.END}, "'blocks.7' is not a module"),
    ],
)
def test_wrong_split_points_are_refused(points: object, message: str) -> None:
    x, _ = batch()
    with pytest.raises(PartitionError, match=message):
        fxchimera.pipeline(
            made(lambda: Marked(fxchimera.split)), example_args=(x,), loss_fn=F.mse_loss, num_stages=2, n_microbatches=2,
            split_points=points,
        )  # fmt: skip
