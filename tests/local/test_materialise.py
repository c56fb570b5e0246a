"""A model built on the meta device gets its weights from any source, and then trains as the model built with them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import fxchimera
from tests.metamodels import VOCABULARY, Mixed, llama, on_meta, tokens
from tests.parity import assert_same_tensors, gradients_of


def mixed_loss(output, target):
    return nn.functional.cross_entropy(output.reshape(-1, VOCABULARY), target.reshape(-1))


def plain_mixed():
    torch.manual_seed(3)
    model = Mixed()
    with torch.no_grad():  # statistics that a checkpoint must bring
        model.norm.running_mean.normal_()
        model.norm.num_batches_tracked.fill_(7)
    return model


def file(model, folder):
    save_model(model, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


def folder_with_one_file(model, folder):
    return str(file(model, folder).parent)


def torch_file(model, folder):
    torch.save(model.state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


def torch_folder(model, folder):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def mapping(model, folder):
    return model.state_dict()


def function(model, folder):
    state = {f"prefix.{name}": value for name, value in model.state_dict().items()}
    return lambda name: state.get(f"prefix.{name}")


SOURCES = [file, folder_with_one_file, torch_file, torch_folder, mapping, function]


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_weights_of_the_plain_model(source, tmp_path):
    plain, model = plain_mixed(), on_meta(Mixed)
    wrap(model, checkpoint=source(plain, tmp_path)).close()
    assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    assert model.head.weight is model.embed.weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_it_trains_as_the_model_with_weights(tmp_path):
    """The witness is the plain model run by ``reference``, which knows nothing of where weights come from."""
    plain, x = plain_mixed(), tokens()
    checkpoint = file(plain, tmp_path)
    model = on_meta(Mixed)
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=mixed_loss, num_stages=2, n_microbatches=4, schedule="1f1b", checkpoint=checkpoint, seed=1
    ) as pipe:
        for _ in range(2):
            wanted = fxchimera.reference(
                plain, x, target=x, loss_fn=mixed_loss, num_stages=2, n_microbatches=4, schedule="1f1b", seed=1
            )
            assert torch.equal(pipe.step(x, target=x), wanted.loss)
            assert_same_tensors(gradients_of(model), wanted.gradients)
            model.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_checkpoint_of_transformers(tied, tmp_path):
    plain = llama(tied=tied).train()
    plain.save_pretrained(tmp_path, max_shard_size="6KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model, x = on_meta(llama, tied=tied).train(), tokens()
    batch = {"input_ids": x, "labels": x}
    options = {"num_stages": 4, "n_microbatches": 4, "schedule": "chimera", "seed": 1}
    with fxchimera.pipeline(model, example_kwargs=batch, checkpoint=tmp_path, **options) as pipe:
        wanted = fxchimera.reference(plain, **batch, **options)
        assert torch.equal(pipe.step(**batch), wanted.loss)
        assert_same_tensors(gradients_of(model), wanted.gradients)
    assert_same_tensors(dict(model.named_buffers()), dict(plain.named_buffers()))  # the rotary table, which no file holds


def test_a_checkpoint_of_another_dtype_is_converted(tmp_path):
    plain = plain_mixed().double()
    save_file({name: value.clone() for name, value in plain.state_dict().items()}, tmp_path / "a.safetensors")
    model = on_meta(Mixed)
    wrap(model, checkpoint=tmp_path / "a.safetensors").close()
    assert_same_tensors(dict(model.state_dict()), dict(plain.float().state_dict()))


def test_a_model_with_weights_is_loaded_in_place(tmp_path):
    plain, model = plain_mixed(), Mixed()
    before = dict(model.named_parameters())
    wrap(model, checkpoint=file(plain, tmp_path)).close()
    assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_what_has_values_keeps_them():
    """Buffers built with values, as accelerate's ``init_empty_weights`` leaves them, and a parameter that was filled by hand."""
    model = on_meta(Mixed)
    model.norm.running_mean = torch.full((6,), 2.5)
    model.head.bias = nn.Parameter(torch.full((VOCABULARY,), 3.5))
    wrap(model).close()
    assert torch.equal(model.norm.running_mean, torch.full((6,), 2.5))
    assert torch.equal(model.head.bias, torch.full((VOCABULARY,), 3.5))
    assert torch.equal(model.norm.running_var, torch.ones(6))


def wrap(model, **options):
    given = {
        "example_args": (tokens(),),
        "loss_fn": mixed_loss,
        "num_stages": 2,
        "n_microbatches": 2,
        "schedule": "1f1b",
        **options,
    }
    return fxchimera.pipeline(model, **given)
