"""The model's own initialisation: what each convention gives, and that it depends on the seed alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fxchimera
from tests.metamodels import VOCABULARY, WIDTH, Mixed, Silent, Titan, llama, on_meta, tokens
from tests.parity import assert_same_tensors


def begun(model, stages, seed=3, **options):
    """The state with which a pipeline begins, non-persistent buffers included."""
    example = {"example_args": (options.pop("x", tokens()),), "loss_fn": lambda output: output.mean()}
    if hasattr(model, "config"):
        example = {"example_kwargs": {"input_ids": tokens(), "labels": tokens()}}
    fxchimera.pipeline(
        model, num_stages=stages, n_microbatches=2, schedule="1f1b" if stages > 1 else "gpipe", seed=seed, **example, **options
    ).close()
    return {**model.state_dict(), **dict(model.named_buffers())}


@pytest.mark.parametrize("build", [Mixed, Titan, lambda: llama(tied=True)], ids=["reset", "whole", "transformers"])
def test_the_weights_depend_on_the_seed_alone(build):
    state = torch.get_rng_state()
    first = begun(on_meta(build), 1)
    torch.manual_seed(99)
    for stages in (2, 4):
        assert_same_tensors(begun(on_meta(build), stages), first)
    torch.set_rng_state(state)
    assert_same_tensors(begun(on_meta(build), 2), first)
    assert torch.equal(torch.get_rng_state(), state)
    other = begun(on_meta(build), 2, seed=4)
    assert any(not torch.equal(other[name], value) for name, value in first.items())


def test_reset_parameters_gives_the_distributions_of_torch():
    state = begun(on_meta(Mixed), 2)
    weight = state["layers.0.linear1.weight"]
    assert weight.abs().max() <= 1 / math.sqrt(WIDTH)  # uniform within 1 / sqrt(inputs): deviation 1 / sqrt(3 inputs)
    assert weight.std().item() == pytest.approx(1 / math.sqrt(3 * WIDTH), rel=0.1)
    embedding = state["embed.weight"]  # tied to the head, where it comes second: an embedding's, N(0, 1)
    assert embedding[1:].std().item() == pytest.approx(1.0, rel=0.1)
    assert not embedding[0].any()
    assert state["rnn.weight_hh_l0"].abs().max() <= 1 / math.sqrt(WIDTH)
    assert not state["layers.0.self_attn.in_proj_bias"].any()
    assert not state["layers.0.self_attn.out_proj.bias"].any()
    assert torch.equal(state["norm.running_var"], torch.ones(6))
    assert torch.equal(state["positions.table"], Mixed().positions.table)


def test_init_weights_of_a_whole_model():
    state = begun(on_meta(Titan), 4)
    assert torch.equal(state["table"], Titan()._table())
    for depth in range(4):
        assert torch.equal(state[f"layers.{depth}.bias"], torch.full((WIDTH,), 0.5))
        assert state[f"layers.{depth}.weight"].std().item() == pytest.approx(0.02 / math.sqrt(depth + 1), rel=0.2)


def test_init_weights_of_transformers():
    plain, state = llama(tied=False), begun(on_meta(llama, tied=False), 4)
    for name, value in plain.state_dict().items():
        if "norm" in name:
            assert torch.equal(state[name], value)
        else:
            assert state[name].std().item() == pytest.approx(0.02, rel=0.3)
    assert_same_tensors({name: state[name] for name, _ in plain.named_buffers()}, dict(plain.named_buffers()))


class Small(nn.Module):
    """Changes after their construction what its modules begin with, as nanoGPT and timm do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(1e-3)

    def forward(self, x):
        return self.head(self.norm(self.inner(x)))


def test_init_weights_of_a_model_comes_after_that_of_its_modules():
    state = begun(on_meta(Small), 2, x=torch.ones(4, WIDTH))
    assert state["inner.weight"].std().item() == pytest.approx(1e-3 / math.sqrt(3 * WIDTH), rel=0.2)
    assert torch.equal(state["norm.weight"], torch.ones(WIDTH))


def fill(module):
    if isinstance(module, Silent):
        module.scale.fill_(4.0)
        module.table.copy_(torch.arange(float(WIDTH)))


def test_a_function_fills_what_modules_do_not():
    state = begun(on_meta(Silent), 2, x=torch.ones(4, WIDTH), param_init_fn=fill)
    assert torch.equal(state["scale"], torch.full((WIDTH,), 4.0))
    assert torch.equal(state["table"], torch.arange(float(WIDTH)))
    assert state["layers.0.weight"].std().item() == pytest.approx(1 / math.sqrt(3 * WIDTH), rel=0.2)


def test_a_function_fills_what_a_checkpoint_lacks():
    given = {"layers.0.weight": torch.eye(WIDTH), "layers.0.bias": torch.zeros(WIDTH)}
    state = begun(on_meta(Silent), 2, x=torch.ones(4, WIDTH), param_init_fn=fill, checkpoint=given)
    assert torch.equal(state["layers.0.weight"], torch.eye(WIDTH))
    assert torch.equal(state["scale"], torch.full((WIDTH,), 4.0))
