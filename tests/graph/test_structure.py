"""Flattening and rebuilding of any Python object that holds tensors."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fxchimera_passes.structure import flatten, follow


@dataclass
class Pair:
    left: Tensor
    right: Any = None
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Tensor
    scale: float


class Named(NamedTuple):
    first: Tensor
    second: int


class Plain:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.tag = "t"


class Settings:
    def __init__(self) -> None:
        self.width = 3


class Items(collections.OrderedDict):
    pass


def tensors(count: int) -> list[Tensor]:
    return [torch.full((2,), float(index)) for index in range(count)]


def roundtrip(value: Any, count: int) -> Any:
    """Rebuild ``value`` with other tensors; check the count, and that rebuilding gives these tensors back."""
    found, structure = flatten(value)
    assert len(found) == structure.count == count
    others = [torch.full_like(tensor, 9.0 + index) for index, tensor in enumerate(found)]
    built = structure.rebuild(others)
    assert all(a is b for a, b in zip(flatten(built)[0], others, strict=True))
    assert all(follow(built, path) is tensor for path, tensor in zip(structure.paths(), others, strict=True))
    return built


def test_plain_containers_keep_their_types_and_constants():
    a, b = tensors(2)
    built = roundtrip({"x": [a, 1, None], "y": (b, "s", slice(0, 3))}, 2)
    assert built["x"][1:] == [1, None]
    assert built["y"][1:] == ("s", slice(0, 3))


def test_a_lone_tensor_and_a_lone_constant():
    (a,) = tensors(1)
    assert flatten(a)[1].rebuild([a]) is a
    assert flatten(5)[0] == []
    assert flatten(None)[1].rebuild([]) is None


def test_objects():
    a, b, c, d = tensors(4)
    built = roundtrip([Pair(a, Slotted(b, 0.5), ["n"]), Named(c, 7), Plain(d)], 4)
    assert isinstance(built[0], Pair)
    assert built[0].names == ["n"]
    assert isinstance(built[0].right, Slotted)
    assert built[0].right.scale == 0.5
    assert isinstance(built[1], Named)
    assert built[1].second == 7
    assert isinstance(built[2], Plain)
    assert built[2].tag == "t"


def test_dict_subclasses():
    a, b, c = tensors(3)
    groups = collections.defaultdict(list, {"k": [a]})
    built = roundtrip((groups, Items(x=b), collections.deque([c], maxlen=4)), 3)
    assert built[0]["new"] == []
    assert type(built[1]) is Items
    assert built[2].maxlen == 4


def test_model_output_keeps_items_and_attributes_together():
    from transformers.modeling_outputs import BaseModelOutput

    a, b = tensors(2)
    built = roundtrip(BaseModelOutput(last_hidden_state=a, hidden_states=(b,)), 2)
    assert built.last_hidden_state is built["last_hidden_state"] is built[0]
    assert built.attentions is None
    assert list(built) == ["last_hidden_state", "hidden_states"]


def test_the_same_tensor_twice_counts_twice():
    (a,) = tensors(1)
    found, structure = flatten((a, a))
    assert len(found) == 2
    assert structure.paths() == [(("item", 0),), (("item", 1),)]


def test_shared_and_cyclic_containers():
    (a,) = tensors(1)
    shared = [a]
    built = roundtrip({"one": shared, "two": shared}, 1)
    assert built["one"] is built["two"]
    cycle: list[Any] = [a]
    cycle.append(cycle)
    again = roundtrip(cycle, 1)
    assert again[1] is again


def test_objects_without_tensors_stay_the_same_object_unless_asked():
    settings = Settings()
    assert flatten([settings])[1].rebuild([])[0] is settings
    fresh = flatten([settings], fresh=True)[1].rebuild([])[0]
    assert fresh is not settings
    assert fresh.width == 3


def test_rebuilt_containers_are_fresh():
    (a,) = tensors(1)
    value = {"list": [a]}
    _, structure = flatten(value)
    structure.rebuild([a])["list"].append(a)
    assert len(structure.rebuild([a])["list"]) == 1


def test_wrong_number_of_tensors():
    (a,) = tensors(1)
    with pytest.raises(ValueError, match="holds 1 tensors, 2 were given"):
        flatten([a])[1].rebuild([a, a])


def test_equal_structures_compare_equal():
    a, b = tensors(2)
    assert flatten({"x": [a, 1]})[1] == flatten({"x": [b, 1]})[1]
    assert flatten({"x": [a, 1]})[1] != flatten({"x": [b, 2]})[1]
