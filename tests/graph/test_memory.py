"""Activation memory against real runs, and cuts within the memory of the ranks against all cuts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fxchimera.planner.choose import Memory, choose_cut, sizes_of
from fxchimera.planner.table import costs_of
from fxchimera.schedule import make_order, simulate
from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.captured import info
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan
from fxchimera_passes.structure import flatten
from tests.graph.staged import planned
from tests.models import MODELS


class Count:
    """Bytes of all memory that a real forward leaves for its backward, each piece once; ``there`` needs none for it."""

    def __init__(self, there):
        self.there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self.held, self.kept = {}, []

    def add(self, tensor):
        self.kept.append(tensor)
        self.held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def bytes(self):
        return sum(size for place, size in self.held.items() if place not in self.there)

    def saving(self):
        return saved_tensors_hooks(self.add, lambda tensor: tensor)


def saved_in_a_real_run(model, *args, **kwargs):
    count = Count([*model.parameters(), *model.buffers(), *flatten((args, kwargs))[0]])
    with count.saving():
        output = model(*args, **kwargs)
    del output
    return count.bytes()


def saved_in_the_recording(model, *args, **kwargs):
    captured = capture(model, args, kwargs, num_stages=kwargs.pop("num_stages", 4))
    held = {}
    for node in captured.graph.nodes:
        held.update(info(node).saved)
    return sum(held.values())


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Softmax(-1), nn.Dropout(0.3), nn.Linear(32, 8))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 10),
    )  # fmt: skip


def test_a_linear_layer_keeps_its_input():
    """An input is not counted; ReLU keeps its result, and the next layer keeps the same memory: one piece."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    captured = capture(model, (torch.randn(5, 4),), {})
    saved = {str(node.target): info(node).saved for node in captured.graph.nodes}
    assert saved["0"] == ()
    assert saved["1"] == saved["2"]
    assert [info(node).saved_bytes for node in captured.graph.nodes if node.target in ("1", "2")] == [5 * 6 * 4] * 2


@pytest.mark.parametrize(("build", "shape"), [(mlp, (4, 8)), (convolutions, (4, 3, 16, 16))])
def test_the_recording_counts_what_a_real_run_saves(build, shape):
    """Exactly: fake operators save the same tensors as real ones."""
    model, x = build(), torch.randn(shape)
    assert saved_in_the_recording(model, x) == saved_in_a_real_run(model, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_keeps_what_it_was_given(reentrant):
    """The block is recorded whole, so its checkpoint works: 64 numbers wide inside, 8 between blocks."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(3)], nn.Linear(8, 8))
    x = torch.randn(4, 8)
    captured = capture(model, (x,), {})
    held = dict(pair for node in captured.graph.nodes for pair in info(node).saved)
    assert sum(held.values()) == 4 * (4 * 8 * 4)  # before each block, and before the last layer
    opened = capture(model, (x,), {}, opened=["1.inner.1"])  # a cut inside takes the checkpoint away
    held = dict(pair for node in opened.graph.nodes for pair in info(node).saved)
    assert sum(held.values()) == 4 * (4 * 8 * 4) + 2 * (4 * 64 * 4)


def real_stage_bytes(example, captured, plan):
    """Run the stages on real tensors, each from copies of what it receives, and count what each leaves for its backward."""
    inputs, _ = flatten((example.args, example.kwargs))
    received, found = (), []
    for graph in split(captured, plan):
        module = graph.bind(example.model)
        count = Count([*example.model.parameters(), *example.model.buffers(), *inputs, *flatten(list(graph.constants.values()))[0]])
        with count.saving():
            sent = module(*received, *(inputs[i] for i in graph.stage.inputs))
        for tensor in (*received, *sent):
            count.add(tensor)
        found.append(count.bytes())
        received = tuple(
            value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad) for value in sent
        )
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_stages_hold_what_they_hold_in_a_real_run(name):
    example = MODELS[name](dropout=0.1)
    captured, plan = planned(example, 3)
    expected = real_stage_bytes(example, captured, plan)
    # where a stage writes in place into what arrives (resnet), the copy that it makes first is not planned for
    assert [stage.activation_bytes for stage in plan.stages] == pytest.approx(expected, rel=0.1 if name == "resnet" else 0.001)


def layers(widths):
    edges = [8, *widths, 8]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(edges)))


def every_cut(captured, costs, order, memory):
    """For each way to cut between layers: seconds of a step, and the largest rank's bytes."""
    found = []
    layers = len(captured.model)
    for inner in itertools.combinations(range(1, layers), order.placement.num_stages - 1):
        plan = make_plan(captured, costs, order.placement.num_stages, split_points=[str(i) for i in inner])
        seconds = simulate(order, costs_of(plan.stages)).makespan
        found.append((seconds, max(need.total for need in memory.needed(plan.stages))))
    return found


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1f1b", 3), ("1f1b", 4), ("chimera", 2), ("chimera", 4), ("zbv", 2), ("gpipe", 2)]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_cut_is_found_iff_there_is_one(schedule, ranks, seed):
    """Against all cuts of seven uneven layers, with caps between "all fit" and "none does".

    What messages add is known of a whole cut only, and a pair of stages has four: there 2 % more than the least is given.
    """
    numbers = torch.Generator().manual_seed(seed)
    model = layers(torch.randint(4, 64, (6,), generator=numbers).tolist())
    captured = capture(model, (torch.randn(8, 8),), {}, num_stages=8, opened=[str(i) for i in range(7)])
    costs, order = analytic(captured, bytes_per_second=1e30), make_order(schedule, ranks, 4)
    sizes = sizes_of(captured)
    known = every_cut(captured, costs, order, Memory.of(order, sizes))
    bounds = sorted({size for _, size in known})
    least = bounds[0] if len(order.placement.replicas(0)) == 1 else int(1.02 * bounds[0])
    for cap in [least, *(size for size in bounds[1:6] if size > least), bounds[len(bounds) // 2], bounds[-1]]:
        memory = Memory.of(order, sizes, (cap,) * ranks)
        stages = choose_cut(captured, costs, order, (), memory).stages
        assert max(need.total for need in memory.needed(stages)) <= cap
        best = min(seconds for seconds, size in known if size <= cap)
        assert simulate(order, costs_of(stages)).makespan <= 1.15 * best
    with pytest.raises(PartitionError, match=rf"may have .*\({bounds[0] // 2} bytes\)"):
        choose_cut(captured, costs, order, (), Memory.of(order, sizes, (bounds[0] // 2,) * ranks))
