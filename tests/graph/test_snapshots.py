"""Written buffers in the graph: what reads them late reads a copy, so that only the writes have to stay together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fxchimera_passes.capture import capture
from fxchimera_passes.capture.targets import rebind
from fxchimera_passes.captured import info
from fxchimera_passes.liveness import sweep
from tests.graph.recorded import WIDTH, Two, assert_same, build, check, data, find, pinned_together, position


class Buffers(Two):
    """Two layers and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(WIDTH))
        self.register_buffer("n", torch.ones(WIDTH))


class Swap(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        self.m, self.n = self.n, self.m
        y: Tensor = self.second(torch.tanh(self.first(x) * self.m)) * self.n
        return y


class Chained(Buffers):
    """The buffer is replaced, the new one written in place, and replaced again."""

    def forward(self, x: Tensor) -> Tensor:
        self.m = self.m + 1
        self.m += x.detach().mean(0)
        y = self.first(x) * self.m
        self.m = self.m * 0.5
        z: Tensor = self.second(torch.tanh(y)) + self.m
        return z


class LateWrite(Buffers):
    """The new value is a view of memory that is written after the view was made."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.m, self.n])
        row = both[0]
        y = self.first(x) + row
        both.add_(x.detach().mean())
        self.m = row
        z: Tensor = self.second(torch.tanh(y) * self.m)
        return z


class Both(Buffers):
    """Written in place, read, replaced, and the old one read on."""

    def forward(self, x: Tensor) -> Tensor:
        self.m.add_(x.detach().mean(0))
        old = self.m
        y = torch.tanh(self.first(x)) + old
        self.m = old * 0.5
        z: Tensor = self.second(y) * self.m + old
        return z


class Counts(nn.Module):
    """Writes its own buffer; recorded as one call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("c", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.c.add_(x.detach().mean(0))
        y: Tensor = self.layer(x) + self.c
        return y


class Inside(nn.Module):
    """Reads a submodule's buffer before, between and after its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Counts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = self.inner.c * 2
        y = self.inner(torch.tanh(self.inner(x)) + self.inner.c)
        z: Tensor = self.last(y) + self.inner.c + before
        return z


@pytest.mark.parametrize("model", [Swap, Chained, LateWrite, Both, Inside])
def test_two_forwards_in_a_row_write_and_read_as_the_plain_model(model: type[nn.Module]) -> None:
    captured = check(build(model))
    assert_same(captured, data() + 1)


class Late(Buffers):
    """Both kinds of writes at the beginning, reads all along."""

    def forward(self, x: Tensor) -> Tensor:
        self.m.add_(1)
        self.n = self.n * 0.9
        y: Tensor = self.second(torch.tanh(self.first(x) * self.m + self.n)) * self.m * self.n
        return y


def test_a_cut_is_possible_behind_the_writes() -> None:
    captured = check(build(Late))
    first, second = find(captured, "first")[0], find(captured, "second")[0]
    write, back = find(captured, "add_")[0], find(captured, rebind)[0]
    assert position(captured, write) < position(captured, back) < position(captured, first)
    assert not pinned_together(captured, first, second)
    assert any(position(captured, first) < cut <= position(captured, second) for cut in sweep(captured).cuttable)
    late = [node for node in captured.graph.nodes if position(captured, node) > position(captured, first)]
    held = [source for node in late for source in node.all_input_nodes]
    assert not any(source is write or (source.op == "get_attr" and info(source).buffers) for source in held)


class Packed(nn.Module):
    """One recurrent layer over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.second = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x), lengths, enforce_sorted=False)
        y: Tensor = self.second(pad_packed_sequence(self.rnn(packed)[0])[0])
        return y


def test_batch_sizes_of_a_packed_sequence_depend_on_the_lengths_alone() -> None:
    x = torch.randn(5, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    captured = capture(build(Packed), (x, torch.tensor([2, 5, 4])), {}, num_stages=2)
    assert_same(captured, x, torch.tensor([2, 5, 4]))
    packed = find(captured, torch._C._VariableFunctions._pack_padded_sequence)[0]
    depends = {node.args[1]: info(node).depends for node in packed.users}
    assert depends == {0: {"input", "parameter"}, 1: {"input"}}

    def holds(lengths: list[int]) -> bool:
        return all(guard.holds((x, torch.tensor(lengths))) for guard in captured.guards)

    assert holds([2, 5, 4])
    assert holds([5, 4, 2])
    assert holds([5, 3, 3])  # as many elements, over as many steps
    assert_same(captured, x, torch.tensor([5, 3, 3]))
    assert not holds([5, 5, 4])
    assert not holds([4, 4, 3])
