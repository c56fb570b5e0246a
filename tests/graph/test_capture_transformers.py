"""What models of transformers need: rotary tables, caches, hidden states collected by hooks."""

from __future__ import annotations

import pytest
import torch

from fxchimera_passes.capture import capture
from fxchimera_passes.capture.state import without_cache
from fxchimera_passes.captured import info
from tests.graph.recorded import assert_same, find
from tests.graph.staged import assert_same_gradients, assert_same_output, forward, plain, planned, step
from tests.models import MODELS, Example


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.randint(1, 48, (4, 10))
        mask = (torch.arange(10) < torch.tensor([[10], [8], [9], [7]])).long()
        model = LlamaForCausalLM(config).double().train()
    return Example(model, (), {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}, None, None)


def test_only_hidden_states_cross_between_the_stages_of_a_llama():
    example, reference = llama(), llama()
    captured, plan = planned(example, 4)
    (rotary,) = find(captured, "model.rotary_emb")
    assert "parameter" not in info(rotary).depends, "it takes the hidden states for their dtype alone"
    for stage in plan.stages[:-1]:
        assert [value.meta.shape for value in stage.sent] == [(4, 10, 16)]
        assert rotary.name in stage.nodes
    output, loss = step(captured, plan, example)
    expected, expected_loss = plain(reference)
    assert torch.equal(loss, expected_loss)
    assert_same_output(output.logits, expected.logits)
    assert_same_gradients(example.model, reference.model)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_that_masks_nothing_is_left_out_as_in_a_plain_run(padded):
    """Transformers would build it on fake tensors; the fused causal kernel takes none."""
    example, reference = llama(), llama()
    mask = example.kwargs["attention_mask"] if padded else torch.ones(4, 10, dtype=torch.long)
    captured, plan = planned(example._replace(kwargs={**example.kwargs, "attention_mask": mask}), 4)
    masks = [node.kwargs["attention_mask"] for node in captured.graph.nodes if "attention_mask" in node.kwargs]
    assert len(masks) == 8, "one for each layer"
    assert all((mask is not None) == padded for mask in masks)
    other = torch.ones(4, 10, dtype=torch.long) if padded else example.kwargs["attention_mask"]
    for given, fits in ((mask, True), (other, False)):
        inputs = tuple({**example.kwargs, "attention_mask": given}.values())
        assert all(guard.holds(inputs) for guard in captured.guards) == fits
    batch = example._replace(kwargs={**example.kwargs, "attention_mask": mask})
    output, loss = step(captured, plan, batch)
    expected, expected_loss = plain(reference._replace(kwargs=batch.kwargs))
    assert torch.equal(loss, expected_loss)
    assert_same_output(output.logits, expected.logits)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_no_cache_is_made_in_a_training_step(monkeypatch, num_stages):
    from transformers import DynamicCache

    example = MODELS["gpt2"]()
    captured, plan = planned(example, num_stages)
    assert ("transformer" in captured.open_modules) == (num_stages == 4)
    assert example.model.config.use_cache
    made = []
    original = DynamicCache.__init__
    monkeypatch.setattr(DynamicCache, "__init__", lambda self, *args, **kwargs: made.append(1) or original(self, *args, **kwargs))
    with without_cache(example.model):  # as every run of the pipeline does: a closed decoder reads its configuration itself
        outputs, _ = forward(captured, plan, example.model, list(example.kwargs.values()))
    assert not made
    assert "past_key_values" not in captured.out_structure.rebuild(outputs)
    example.model(**example.kwargs)
    assert made


def test_hidden_states_of_a_transformers_model():
    example = MODELS["bert"](dtype=torch.float64)
    kwargs = {**example.kwargs, "output_hidden_states": True}
    captured = capture(example.model, example.args, kwargs, num_stages=4)
    assert_same(captured, *example.args, **kwargs)
