"""A model is recorded again by running it once; twice only where a first call differs from all later ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxchimera_passes.capture import capture, recapture
from fxchimera_passes.captured import Captured
from tests.graph.recorded import WIDTH, assert_same, build, data


class Counted(nn.Module):
    """Counts the runs of its forward in a list that is not its own."""

    def __init__(self, runs: list[int]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.note = runs.append

    def forward(self, x: Tensor) -> Any:
        self.note(1)
        return self.second(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Installing(Counted):
    """Installs a hook on its first call, as transformers does to collect hidden states."""

    installed = False

    def __init__(self, runs: list[int]) -> None:
        super().__init__(runs)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        if not self.installed:
            self.first.register_forward_hook(lambda module, args, result: self.seen.append(result))
            self.installed = True
        out = super().forward(x)
        return out, self.seen.pop()


class Keeping(Counted):
    """Keeps a tensor from call to call."""

    last: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return torch.tanh(x)


def again(model: nn.Module, runs: list[int], captured: Captured) -> int:
    """Record for more rows, compare with the plain model; return how often the forward ran in the recording."""
    runs.clear()
    other = recapture(captured, (data(5),), {}, training=True)
    found = len(runs)
    assert_same(other, data(5))
    return found


def test_one_run_is_enough() -> None:
    runs: list[int] = []
    model = build(Counted, runs)
    captured = capture(model, (data(),), {}, num_stages=8)
    assert [again(model, runs, captured) for _ in range(2)] == [1, 1]


def test_what_the_first_call_installs_is_there_already_and_gone_afterwards() -> None:
    runs: list[int] = []
    model = build(Installing, runs)
    captured = capture(model, (data(),), {}, num_stages=8)
    assert (len(model.first._forward_hooks), "installed" in vars(model)) == (0, False)
    runs.clear()
    other = recapture(captured, (data(5),), {}, training=True)
    assert len(runs) == 1
    assert (len(model.first._forward_hooks), "installed" in vars(model)) == (0, False)
    assert len(other.graph.find_nodes(op="output")[0].args[0]) == 2, "the hook has run: the hidden state is an output"


def test_a_hook_of_the_users_since_then_is_kept_and_installed_around() -> None:
    runs: list[int] = []
    model = build(Installing, runs)
    captured = capture(model, (data(),), {}, num_stages=8)
    calls: list[int] = []
    handle = model.first.register_forward_hook(lambda module, args, result: calls.append(1))
    runs.clear()
    recapture(captured, (data(5),), {}, training=True)
    assert len(runs) == 2, "the model has installed its hook by itself, in a first call"
    assert len(calls) == 2
    assert list(model.first._forward_hooks) == [handle.id]


def test_a_model_that_has_installed_its_hooks_meanwhile_does_not_get_them_twice() -> None:
    runs: list[int] = []
    model = build(Installing, runs)
    captured = capture(model, (data(),), {}, num_stages=8)
    model(data())
    hooks = list(model.first._forward_hooks)
    runs.clear()
    recapture(captured, (data(5),), {}, training=True)
    assert len(runs) == 1
    assert list(model.first._forward_hooks) == hooks


def test_tensors_that_a_forward_keeps_take_a_second_run() -> None:
    runs: list[int] = []
    model = build(Keeping, runs)
    captured = capture(model, (data(),), {}, num_stages=8)
    assert again(model, runs, captured) == 2
