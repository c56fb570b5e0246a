"""Stage modules hold the model's own parameters: the same objects, at the same addresses, before and after a step."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxchimera
from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan
from tests.local.toys import WIDTH, chain, data, seeded, wrapped
from tests.models import MODELS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_stage_modules_are_made_of_the_models_own_objects(name: str) -> None:
    example = MODELS[name]()
    captured = capture(example.model, example.args, example.kwargs, num_stages=3)
    held = {id(tensor): tensor for tensor in (*example.model.parameters(), *example.model.buffers())}
    addresses = {key: tensor.data_ptr() for key, tensor in held.items()}
    seen: set[int] = set()
    for graph in split(captured, make_plan(captured, analytic(captured), 3)):
        stage = graph.bind(example.model)
        seen |= {id(parameter) for parameter in stage.parameters()}
        for module in graph.modules:
            assert stage.get_submodule(module) is example.model.get_submodule(module)
    assert seen == {id(parameter) for parameter in example.model.parameters()}
    assert addresses == {key: tensor.data_ptr() for key, tensor in held.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_step_leaves_every_parameter_where_it_was(schedule: str) -> None:
    model, (x, y) = chain(4), data(8)
    before = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]
    with wrapped(model, x, num_stages=4, n_microbatches=4, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        for name, parameter in pipe.named_parameters():
            assert parameter is model.get_parameter(name)
        for executor in pipe._engine.executors:  # the second copies share the memory of the first
            for replica in executor.replicas.values():
                for name, parameter in replica.parameters.items():
                    assert parameter.data_ptr() == model.get_parameter(name).data_ptr()
    assert all(now is then and now.data_ptr() == address for now, (then, address) in zip(model.parameters(), before, strict=True))


class Logits(nn.Module):
    """What the benchmark measures must have: an output with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(3)

    def forward(self, x: Tensor) -> argparse.Namespace:
        return argparse.Namespace(logits=self.layers(x))


def test_the_benchmark_of_the_overhead_gives_its_figures() -> None:
    spec = importlib.util.spec_from_file_location("overhead", ROOT / "benchmarks" / "overhead.py")
    assert spec is not None
    assert spec.loader is not None
    overhead = sys.modules["overhead"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(overhead)
    case = overhead.Case(seeded(Logits), {"x": torch.zeros(2, WIDTH, dtype=torch.float64)})
    found = overhead.measure(case, overhead.parse(["--rounds", "2", "--stages", "3"]))
    assert set(found) == {"eager_ms", "stages_ms", "ratio", "nodes", "opened"}
    assert min(found.values()) > 0


class Projected(nn.Module):
    """A residual block whose shortcut is projected, and a skip around it: three gradients meet in what enters the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.main, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.shortcut = nn.Sequential(nn.Linear(64, 1), nn.Linear(1, 64))  # so small that it stays one call
        self.after = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = self.main(x)
        y += self.shortcut(x)
        return self.last(self.after(y.relu_())) + x


def test_what_a_layer_with_weights_reads_is_not_copied_for_a_later_write() -> None:
    """A copy would add the two gradients of the block before that of the skip, which rounds otherwise."""
    torch.manual_seed(0)
    x, plain = torch.randn(16, 64), Projected()
    model = copy.deepcopy(plain)
    plain(x).square().mean().backward()
    options = {"num_stages": 3, "n_microbatches": 1, "schedule": "1f1b", "split_points": ["main", "last"]}
    with fxchimera.pipeline(model, example_args=(x,), loss_fn=lambda out: out.square().mean(), **options) as pipe:
        pipe.step(x)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad), name
