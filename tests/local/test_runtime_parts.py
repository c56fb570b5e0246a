"""The small parts of the runtime, one by one, each against a plain computation."""

from __future__ import annotations

import copy
import queue
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fxchimera import FxChimeraError, PipelineError
from fxchimera.runtime.failures.failure import Cause, Failure, Limits
from fxchimera.runtime.stages.batchnorm import Delta, apply_deltas, norm_layers, on_scratch_statistics
from fxchimera.runtime.stages.clone import clone_modules
from fxchimera.runtime.stages.entry import Entry
from fxchimera.runtime.stages.gradients import GradientSum, add_to_grad, take_gradients

# ---------------------------------------------------------------------- gradients


@given(st.permutations([(pipe, stage) for pipe in range(2) for stage in range(3)]))
def test_gradients_are_summed_in_one_order_whatever_arrives_first(arrivals: list[tuple[int, int]]) -> None:
    """Uses of a pipe by stage, then pipes.  In float32 1e8 + 1 is 1e8, so the numbers tell the association."""
    parts = {(0, 0): 1e8, (0, 1): 1.0, (0, 2): -1e8, (1, 0): 1.0, (1, 1): 1e8, (1, 2): -1e8}
    total = GradientSum()
    for use in arrivals:
        total.add(use, torch.tensor(parts[use]))
    down = (torch.tensor(1e8) + 1.0) - 1e8
    up = (torch.tensor(1.0) + 1e8) - 1e8
    assert torch.equal(total.total(), down + up)
    assert float(down + up) == 0.0


def test_replicas_without_a_gradient_do_not_count() -> None:
    total = GradientSum()
    total.add((0, 0), None)
    assert total.total() is None
    total.add((1, 0), torch.tensor(2.0))
    total.add((1, 0), torch.tensor(3.0))  # a second step of the same replica
    assert total.total() == 5.0


def test_gradients_taken_and_added_keep_the_users_tensor() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = earlier = torch.ones(2)
    taken = take_gradients({"p": parameter})
    assert parameter.grad is None
    add_to_grad(parameter, taken["p"], torch.full((2,), 2.0))
    assert parameter.grad is earlier
    assert earlier.tolist() == [3.0, 3.0]
    add_to_grad(parameter, None, None)
    assert parameter.grad is None


# ---------------------------------------------------------------------- batch norm


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("start", [0, 5])
def test_deltas_give_the_plain_loops_statistics(momentum: float | None, calls: int, start: int) -> None:
    """Also with momentum None (a cumulative average), a layer used twice a micro-batch, and statistics not from zero."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(3 + i % 2, 4, generator=generator, dtype=torch.float64) for i in range(start + 6)]
    layer, reference = (nn.BatchNorm1d(4, momentum=momentum).double() for _ in range(2))
    for batch in batches[:start]:
        layer(batch)
        reference(batch)
    norms = norm_layers({"bn": layer})
    deltas: dict[int, Delta] = {}
    for number in (1, 0, 2):  # in any order
        before = copy.deepcopy(layer.state_dict())
        with on_scratch_statistics(norms) as found:
            outputs = [layer(batch) for batch in batches[start + 2 * number :][:calls]]
        deltas[number] = found["bn"]
        torch.testing.assert_close(layer.state_dict(), before, rtol=0.0, atol=0.0)
        assert torch.equal(outputs[0], F.batch_norm(batches[start + 2 * number], None, None, layer.weight, layer.bias, True))
    apply_deltas(layer, [deltas[number] for number in range(3)])
    for number in range(3):
        for batch in batches[start + 2 * number :][:calls]:
            reference(batch)
    torch.testing.assert_close(layer.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


def test_layers_that_write_no_statistics_leave_no_delta() -> None:
    layers = {"a": nn.BatchNorm1d(4, track_running_stats=False), "b": nn.BatchNorm1d(4).eval(), "c": nn.LayerNorm(4)}
    with on_scratch_statistics(norm_layers(layers)) as found:
        for layer in layers.values():
            layer(torch.randn(3, 4))
    assert found == {}


def test_statistics_are_back_after_an_error() -> None:
    layer = nn.BatchNorm1d(4)
    mean = layer.running_mean
    with pytest.raises(ValueError, match="expected 2D"), on_scratch_statistics(norm_layers({"": layer})):
        layer(torch.ones(4))
    assert layer.running_mean is mean


# ---------------------------------------------------------------------- clones


def cloned(model: nn.Module, name: str) -> tuple[nn.Module, dict[int, nn.Parameter]]:
    """A clone of a submodule whose parameters are replaced by new ones."""
    new = {id(p): nn.Parameter(p.detach().clone()) for p in model.parameters()}
    root = nn.Module()
    clone_modules(root, model, [name], dict(new))
    return root.get_submodule(name), new


def test_a_clone_has_the_given_parameters_and_the_users_hooks() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    seen: list[nn.Module] = []
    model[0][0].register_forward_hook(lambda module, *_: seen.append(module))
    clone, new = cloned(model, "0")
    for ours, theirs in zip(clone.parameters(), model.parameters(), strict=True):
        assert ours is new[id(theirs)]
    clone(torch.ones(1, 2))
    assert seen == [clone[0]]
    assert clone[0] is not model[0][0]


def test_a_tie_inside_a_clone_stays_a_tie() -> None:
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    inner[1].weight = inner[0].weight
    clone, _ = cloned(nn.Sequential(inner), "0")
    assert clone[0].weight is clone[1].weight
    assert clone[0].weight is not inner[0].weight


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
def test_a_parametrised_layer_can_be_cloned(make: Any) -> None:
    model = nn.Sequential(make(nn.Linear(3, 3))).eval()
    clone, new = cloned(model, "0")
    x = torch.randn(2, 3)
    assert torch.equal(clone(x), model[0](x))
    clone(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(parameter.grad is not None for parameter in new.values())


def test_a_hook_that_is_the_modules_own_method_belongs_to_the_clone() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_forward_hook(self.times)

        def times(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Scaled())
    clone, _ = cloned(model, "0")
    with torch.no_grad():
        clone.scale.fill_(5.0)
    assert clone(torch.ones(())) == 5.0
    assert model(torch.ones(())) == 2.0


def test_a_module_that_cannot_be_cloned_is_named() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(FxChimeraError, match=r"module '0' \(Locked\) cannot be cloned.*1f1b"):
        cloned(nn.Sequential(Locked()), "0")


# ---------------------------------------------------------------------- entry


def test_received_values_may_be_written_in_place() -> None:
    """They are neither leaves nor views, and each has a version counter of its own; gradients are those of a plain graph."""
    first, second, index = torch.ones(3), torch.full((3,), 2.0), torch.tensor([0, 2])
    entry = Entry([first, index, second], [True, False, True])
    x, places, y = entry.enter()
    assert places is index
    assert not x.is_leaf
    assert not x._is_view()
    (x.mul_(3).relu_()[places].sum() + (y * y).sum()).backward()
    gradient_x, gradient_y = entry.gradients
    assert gradient_x is not None
    assert gradient_y is not None
    assert gradient_x.tolist() == [3.0, 0.0, 3.0]
    assert gradient_y.tolist() == [4.0, 4.0, 4.0]


def test_a_value_nobody_uses_has_no_gradient() -> None:
    entry = Entry([torch.ones(2), torch.ones(2)], [True, True])
    x, _ = entry.enter()
    x.sum().backward()
    assert entry.gradients[1] is None


def test_without_gradients_values_enter_as_they_are() -> None:
    value = torch.ones(2)
    with torch.no_grad():
        (entered,) = Entry([value], [True]).enter()
    assert not entered.requires_grad


# ---------------------------------------------------------------------- failure


def test_a_wait_ends_with_what_comes() -> None:
    source: queue.SimpleQueue[int] = queue.SimpleQueue()
    source.put(4)
    assert Failure(Limits()).wait(source, "rank 0") == 4


def test_a_wait_has_a_limit_and_says_how_to_change_it() -> None:
    with pytest.raises(PipelineError, match=r"rank 2, action 1F0 has waited 0\.01 s.*wait_seconds="):
        Failure(Limits(wait_seconds=0.01)).wait(queue.SimpleQueue(), "rank 2, action 1F0")


def test_a_wait_ends_when_another_rank_fails() -> None:
    failure = Failure(Limits(wait_seconds=60.0))
    threading.Timer(0.05, failure.report, [Cause(3, "stage 3: ValueError: planted")]).start()
    start = time.monotonic()
    with pytest.raises(PipelineError, match="rank 3 failed: stage 3: ValueError: planted"):
        failure.wait(queue.SimpleQueue(), "rank 0")
    assert time.monotonic() - start < 2.0


def test_the_first_cause_wins() -> None:
    failure = Failure(Limits())
    failure.check()
    first = Cause(1, "first")
    assert failure.report(first) is first
    assert failure.report(Cause(2, "second")) is first
    with pytest.raises(PipelineError, match="rank 1 failed: first"):
        failure.check()
