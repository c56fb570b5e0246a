"""Objects and containers that pass between modules, and tensors that leave by other ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from fxchimera_passes.capture import capture, interpret
from fxchimera_passes.capture.targets import reached, rebuild
from fxchimera_passes.errors import CaptureError
from tests.graph.recorded import WIDTH, assert_same, build, check, data, find, pinned_together


@dataclass
class State:
    hidden: Tensor
    extra: Any
    step: int


def test_dataclass_none_and_dict_between_modules():
    class Maker(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return State(self.layer(x), {"twice": 2 * x, "nothing": None}, 3)

    class Taker(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, state, mask=None):
            return {"out": self.layer(state.hidden) * state.step + state.extra["twice"], "mask": mask}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.maker, self.taker, self.last = Maker(), Taker(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            state = self.maker(x)
            return {"y": self.last(self.taker(state, mask=None)["out"]), "state": state}

    captured = check(build(Model), stages=1)
    (made,) = find(captured, rebuild)
    (user,) = find(captured, "taker")
    assert pinned_together(captured, made, user)
    built = captured.out_structure.rebuild(interpret(captured, [data()]))
    assert isinstance(built["state"], State)
    assert built["state"].step == 3
    assert built["state"].extra["nothing"] is None


def test_containers_filled_by_a_call_are_read_back():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, cache):
            cache["all"].append(self.layer(x))
            return cache["all"][-1] * len(cache["all"])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            cache: dict[str, list[Tensor]] = {"all": []}
            for layer in self.layers:
                x = layer(x, cache)
            return x, sum(cache["all"])

    captured = check(build(Model), stages=1)
    assert len(find(captured, reached)) >= 3
    assert_same(captured, data())  # a second micro-batch gets containers of its own


def test_a_tensor_that_leaves_by_a_side_channel_opens_its_module():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(WIDTH, WIDTH), []

        def forward(self, x):
            y = self.layer(x)
            self.seen[0].append(y * 2)
            return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            bag: list[Tensor] = []
            object.__setattr__(self.inner, "seen", self.inner.seen)
            self.inner.seen[:] = [bag]
            y = self.last(self.inner(x))
            self.inner.seen.clear()
            return y + bag[0]

    captured = check(build(Model), stages=1)
    assert "side" in captured.report.opened["inner"] or "not part of its result" in captured.report.opened["inner"]


def test_a_tensor_smuggled_between_modules_is_refused_at_the_root():
    box: list[Tensor] = []

    class Put(nn.Module):
        def forward(self, x):
            box[:] = [x * 2]
            return x

    class Take(nn.Module):
        def forward(self, x):
            return x + box[0]

    with pytest.raises(
        CaptureError, match=r"Take \(2\) reads a tensor of shape .*, made inside Put \(0\), that was not passed to it"
    ):
        capture(nn.Sequential(Put(), nn.Linear(WIDTH, WIDTH).double(), Take()), (data(),), {})


class Store:
    """A cache: empty at first, then it holds keys."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Asks(nn.Module):
    def forward(self, x: Tensor, store: Store) -> Tensor:
        return x * (10 if store.keys else 1)


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, store: Store) -> Tensor:
        store.keys.append(self.layer(x))
        return x + store.keys[-1]


def test_a_cache_is_empty_again_for_a_call_that_saw_it_so():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asks, self.fills = Asks(), nn.ModuleList(Fills() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            store = Store()
            x = self.asks(x, store)
            for fill in self.fills:
                x = fill(x, store)
            return self.asks(x, store)

    check(build(Model))
