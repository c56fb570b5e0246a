"""Every model of the zoo, captured for 1, 4 and 8 stages: the graph is the model, bit for bit, and the model is left alone."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.capture import capture, interpret, recapture
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.structure import flatten
from tests.graph.staged import recorded
from tests.models import MODELS, Example

STAGES = (1, 4, 8)
every_model = pytest.mark.parametrize("name", MODELS)
every_count = pytest.mark.parametrize("stages", STAGES)


def eager(example: Example) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Return the loss, the gradients and the state after one plain step on a copy (caches off, as in a training step)."""
    model = copy.deepcopy(example.model)
    if hasattr(model, "config"):
        model.config.use_cache = False
    output = model(*example.args, **example.kwargs)
    loss = example.loss(output)
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters()}, [*flatten(output)[0], *model.buffers()]


def staged(captured: Captured, example: Example) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Return the same from the captured graph."""
    outputs = interpret(captured, flatten((example.args, example.kwargs))[0])
    loss = example.loss(captured.out_structure.rebuild(outputs))
    loss.backward()
    model = captured.model
    return loss, {n: p.grad for n, p in model.named_parameters()}, [*outputs, *model.buffers()]


def assert_same(captured: Captured, example: Example) -> None:
    loss, gradients, state = eager(example)
    ours, our_gradients, our_state = staged(captured, example)
    assert torch.equal(loss, ours)
    assert gradients.keys() == our_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient is None) == (our_gradients[name] is None), name
        assert gradient is None or torch.equal(gradient, our_gradients[name]), name
    assert len(state) == len(our_state)
    assert all(torch.equal(a, b) for a, b in zip(state, our_state, strict=True))


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything of the model that a recording could touch, by identity and, one container deep, by content."""
    found: list[Any] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inside = list(value.items()) if isinstance(value, dict) else list(value) if isinstance(value, (list, set)) else None
            found.append((name, key, value, None if inside is None else [(id(part), str(part)[:40]) for part in inside]))
    return found


def assert_untouched(before: list[Any], after: list[Any]) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old[:2] == new[:2]
        assert old[2] is new[2], old[:2]


@every_model
@every_count
def test_graph_is_the_model_and_the_model_is_left_alone(name, stages):
    example = MODELS[name](dtype=torch.float64)
    model = example.model
    values = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    before, config = fingerprint(model), copy.deepcopy(getattr(model, "config", None))
    generators = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    call, apply = nn.Module.__call__, vars(torch.autograd.Function)["apply"]

    captured = capture(model, example.args, example.kwargs, num_stages=stages)

    assert_untouched(before, fingerprint(model))
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), str(np.random.get_state())) == generators[1:]
    assert nn.Module.__call__ is call
    assert vars(torch.autograd.Function)["apply"] is apply
    assert config is None or model.config.to_dict() == config.to_dict()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(captured, example)


@every_model
@every_count
def test_other_batch_size_and_meta_parameters(name, stages):
    example, other = MODELS[name](dtype=torch.float64), MODELS[name](dtype=torch.float64, batch=6)
    captured = recorded(name, stages)
    hollow = copy.deepcopy(example.model).to("meta")

    from_meta = capture(hollow, example.args, example.kwargs, num_stages=stages)
    assert str(from_meta.graph) == str(captured.graph)
    assert all(parameter.is_meta for parameter in hollow.parameters())

    again = recapture(from_meta, other.args, other.kwargs, training=True)
    assert again.open_modules == captured.open_modules
    assert_same(dataclasses.replace(again, model=other.model), other)


@every_model
def test_nodes_know_the_model(name):
    captured = recorded(name, 4)
    model, nodes = captured.model, list(captured.graph.nodes)
    example = MODELS[name]()
    inputs = flatten((example.args, example.kwargs))[0]

    assert [node.target for node in nodes if node.op == "placeholder"] == [f"input_{i}" for i in range(len(inputs))]
    assert captured.parameters.keys() == dict(model.named_parameters()).keys()
    assert sorted(n for names in captured.parameters.values() for n in names) == sorted(
        n for n, _ in model.named_parameters(remove_duplicate=False)
    )
    read = {name for node in nodes[:-1] for name in info(node).parameters}
    assert read == captured.parameters.keys()
    for node in nodes[:-1]:
        if node.op == "call_module":
            own = dict(model.get_submodule(node.target).named_parameters())
            assert len(info(node).parameters) == len(own)
            assert info(node).module in captured.open_modules
            assert info(node).line.rpartition(":")[2].isdigit()
    assert all(first < last < len(nodes) - 1 for first, last in captured.pinned)
    assert "" in captured.open_modules


@every_model
def test_values_have_the_meta_data_of_a_real_run(name):
    from fxchimera_passes.capture.interpret import GraphInterpreter
    from fxchimera_passes.captured import TensorMeta

    example, captured = MODELS[name](dtype=torch.float64), recorded(name, 4)
    wrong: list[Any] = []

    class Check(GraphInterpreter):
        def run_node(self, n):
            result = super().run_node(n)
            expected = TensorMeta.of(result) if isinstance(result, Tensor) else None
            if n.op != "output" and info(n).value != expected:
                wrong.append((n.name, info(n).value, expected))
            return result

    Check(example.model, captured.graph, captured.constants).run(*flatten((example.args, example.kwargs))[0])
    assert not wrong


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert", "nn_transformer", "resnet", "skip", "masked_rotary", "tied"])
def test_dropout_masks_have_the_same_names_for_every_cut(name):
    keys = [[key for node in recorded(name, stages, 0.3).graph.nodes for key in info(node).random] for stages in STAGES]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[0])) == len(keys[0])
    drops = [n for n, m in recorded(name, 8, 0.3).model.named_modules() if isinstance(m, (nn.Dropout, nn.Dropout2d)) and m.p]
    assert {key.module for key in keys[0]} >= {n for n in drops if "attn_dropout" not in n and "self.dropout" not in n}


@pytest.mark.parametrize("name", ["mlp", "gpt2", "nn_transformer"])
def test_random_numbers_are_drawn_in_the_order_of_the_model(name):
    example = MODELS[name](dropout=0.3, dtype=torch.float64)
    captured = dataclasses.replace(recorded(name, 8, 0.3), model=example.model)
    torch.manual_seed(3)
    loss, gradients, _ = eager(example)
    torch.manual_seed(3)
    ours, our_gradients, _ = staged(captured, example)
    assert torch.equal(loss, ours)
    assert all(torch.equal(gradients[n], our_gradients[n]) for n in gradients)


def test_evaluation_mode():
    example = MODELS["resnet"](dtype=torch.float64, dropout=0.3)
    captured = capture(example.model, example.args, example.kwargs, num_stages=4)
    evaluated = recapture(captured, example.args, example.kwargs, training=False)
    assert example.model.training
    assert not any(info(node).random or info(node).writes for node in evaluated.graph.nodes if node.op != "output")
    example.model.eval()
    with torch.no_grad():
        assert torch.equal(interpret(evaluated, list(example.args))[0], example.model(*example.args))


def test_mask_left_out():
    example = MODELS["bert"](dtype=torch.float64)
    captured = capture(example.model, example.args, example.kwargs, num_stages=4)
    kwargs = {"labels": example.kwargs["labels"]}
    assert_same(recapture(captured, example.args, kwargs, training=True), example._replace(kwargs=kwargs))
