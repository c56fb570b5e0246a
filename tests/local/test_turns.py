"""Gradients are added by micro-batch, ascending, whatever order the backwards run in."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fxchimera.runtime.stages.turns import Turns

# in float32 1e8 + 1 is 1e8, so the sum tells its order
PARTS = (1e8, 1.0, -1e8, 1.0)
ASCENDING = ((torch.tensor(1e8) + 1.0) - 1e8) + 1.0


def add(parameter: nn.Parameter, value: float) -> None:
    """As the engine does."""
    parameter.grad = torch.tensor(value) if parameter.grad is None else parameter.grad + value


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_whole_backwards_in_any_order(order: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.tensor(0.0))
    turns = Turns(range(4), [p])
    for microbatch in order:
        with turns.adding(microbatch):
            add(p, PARTS[microbatch])
    assert torch.equal(p.grad, ASCENDING)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_weight_parts_in_any_order(order: tuple[int, ...]) -> None:
    """``late`` gets its gradient with W; ``soon`` with I, which must not wait for the W of another parameter."""
    late, soon = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
    turns = Turns(range(4), [late, soon])
    for microbatch in range(4):
        with turns.adding(microbatch, [late]):
            add(soon, PARTS[microbatch])
    assert torch.equal(soon.grad, ASCENDING)
    assert late.grad is None
    for microbatch in order:
        with turns.adding(microbatch):
            add(late, PARTS[microbatch])
    assert torch.equal(late.grad, ASCENDING)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_parameter_that_comes_now_with_one_part_now_with_the_other(order: tuple[int, ...]) -> None:
    """Micro-batches 1 and 3 keep it for W, 0 and 2 do not; the first parts run in ``order``, the weight parts after them."""
    p = nn.Parameter(torch.tensor(0.0))
    turns = Turns(range(4), [p])
    for microbatch in order:
        with turns.adding(microbatch, [p] if microbatch % 2 else []):
            if not microbatch % 2:
                add(p, PARTS[microbatch])
    for microbatch in (3, 1):
        with turns.adding(microbatch):
            add(p, PARTS[microbatch])
    assert torch.equal(p.grad, ASCENDING)


def test_a_promise_may_be_narrowed() -> None:
    """Nothing flowed to the operator that was to be put off: nobody waits for it."""
    p = nn.Parameter(torch.tensor(0.0))
    turns = Turns((0, 1), [p])
    with turns.adding(0, [p]) as later:
        later.clear()
    with turns.adding(1):
        add(p, 2.0)
    assert p.grad == 2.0


def test_two_pieces_of_one_micro_batch_are_added_first() -> None:
    """A use that nobody had foreseen: its gradient comes with I, the rest with W; the parameter is named."""
    p = nn.Parameter(torch.tensor(0.0))
    turns = Turns((0, 1), [p])
    with turns.adding(0):
        add(p, -1e8)
    with turns.adding(1, [p]):
        add(p, 1.0)
    assert turns.early(1) == {id(p)}
    with turns.adding(1):
        add(p, 1e8)
    assert torch.equal(p.grad, torch.tensor(-1e8) + (torch.tensor(1.0) + 1e8))
    assert turns.early(1) == frozenset()


def test_a_failure_leaves_gradients_as_they_were() -> None:
    p = nn.Parameter(torch.tensor(0.0))
    turns = Turns((0, 1), [p])
    p.grad = before = torch.tensor(3.0)
    with pytest.raises(ZeroDivisionError), turns.adding(1):
        raise ZeroDivisionError
    assert p.grad is before


def test_sparse_gradients() -> None:
    """As autograd adds them: the sum is sparse again."""
    p = nn.Parameter(torch.zeros(3, 2))
    turns = Turns((0, 1), [p])
    for microbatch in (1, 0):
        with turns.adding(microbatch):
            index = torch.tensor([[microbatch, 2]])
            p.grad = torch.sparse_coo_tensor(index, torch.full((2, 2), 1.0 + microbatch), (3, 2))
    assert p.grad.is_sparse
    assert p.grad.to_dense().tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
