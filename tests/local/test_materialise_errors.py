"""What cannot be given weights is refused, naming the tensor, both shapes or files, and what to do."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fxchimera
from fxchimera import FxChimeraError
from tests.metamodels import WIDTH, Silent, on_meta


def layers():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def state(**others):
    found = {name: value.clone() for name, value in layers().state_dict().items()}
    return {name: value for name, value in {**found, **others}.items() if value is not None}


def wrap(model, **options):
    example = {"example_args": (torch.ones(4, WIDTH),), "loss_fn": lambda output: output.mean()}
    return fxchimera.pipeline(model, num_stages=2, n_microbatches=2, schedule="1f1b", **example, **options)


def refusal(model, **options):
    with pytest.raises(FxChimeraError) as caught:
        wrap(model, **options)
    return str(caught.value)


def test_a_parameter_that_the_checkpoint_lacks(tmp_path):
    save_file(state(**{"2.bias": None, "3.bias": torch.ones(WIDTH)}), tmp_path / "a.safetensors")
    text = refusal(on_meta(layers), checkpoint=tmp_path)
    assert "no values for 1 parameters: '2.bias'" in text
    assert "it holds '0.bias', '0.weight', '2.weight', '3.bias'" in text
    assert "param_init_fn=" in text
    assert "'2.bias'" in refusal(on_meta(layers), checkpoint=state(**{"2.bias": None}).get)


def test_what_only_the_checkpoint_has():
    with pytest.warns(UserWarning, match=r"also holds 'optimizer.step', which the model does not have"):
        wrap(on_meta(layers), checkpoint=state(**{"optimizer.step": torch.ones(1)})).close()


def test_another_shape():
    text = refusal(on_meta(layers), checkpoint=state(**{"2.weight": torch.ones(WIDTH, 3)}))
    assert "'2.weight' with the shape (16, 3), but the model's is (16, 16)" in text


def test_another_kind_of_number():
    text = refusal(on_meta(layers), checkpoint=state(**{"2.weight": torch.ones(WIDTH, WIDTH, dtype=torch.int8)}))
    assert "'2.weight' as torch.int8 on cpu, which cannot become the model's torch.float32" in text


def test_a_function_that_gives_something_else():
    assert "gives a list for '0.weight'" in refusal(on_meta(layers), checkpoint=lambda name: [1.0])


def test_a_parameter_that_nothing_fills():
    text = refusal(on_meta(Silent))
    assert "parameter 'scale' of shape (16,) (and 1 more) is on the meta device and nothing fills it" in text
    assert "Silent has no reset_parameters()" in text


def test_a_buffer_that_no_checkpoint_holds():
    text = refusal(on_meta(Silent), checkpoint=Silent().state_dict())
    assert "non-persistent buffer 'table' of shape (16,) is on the meta device and nothing fills it" in text
    assert "assign the module a buffer with values" in text
    model = on_meta(Silent)
    model.table = torch.arange(float(WIDTH))
    wrap(model, checkpoint=Silent().state_dict()).close()  # as advised


def test_an_initialisation_that_fails():
    def fill(module):
        module.weight.copy_(torch.ones(3, 7))

    text = refusal(on_meta(layers), param_init_fn=fill)
    assert "param_init_fn failed for module '0' (Linear): RuntimeError" in text


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.offset = layers(), torch.ones(WIDTH)

    def forward(self, x):
        return self.layers(x) + self.offset


def test_a_tensor_that_is_no_buffer():
    text = refusal(on_meta(Offset))
    assert "neither parameters nor buffers, so that nothing can give them values: 'offset'" in text
    assert "test_materialise_errors.py:" in text


def folders(path):
    """Folders that hold no checkpoint, and a part of the refusal."""
    (path / "empty").mkdir()
    yield path / "empty", "holds no .safetensors, .bin, .pt, .pth"
    (path / "two").mkdir()
    for name in ("a", "b"):
        save_file(state(), path / "two" / f"{name}.safetensors")
    yield path / "two", "2 candidates (a.safetensors, b.safetensors)"
    (path / "dcp").mkdir()
    (path / "dcp" / ".metadata").touch()
    yield path / "dcp", "torch.distributed.checkpoint"
    (path / "index").mkdir()
    (path / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": "gone.safetensors"}}))
    yield path / "index", "names 1 files that are not there: gone.safetensors"
    (path / "torn").mkdir()
    (path / "torn" / "model.safetensors").write_bytes(b"\x00" * 20)
    yield path / "torn", "model.safetensors cannot be read"
    (path / "words").mkdir()
    (path / "words" / "model.safetensors.index.json").write_text("[")
    yield path / "words", "the index"
    torch.save({"model": state(), "step": 3}, path / "nested.pt")
    yield path / "nested.pt", "nested.pt holds a dict with ['model', 'step'], not tensors by name"
    yield path / "nowhere.safetensors", "nowhere.safetensors cannot be read"
    yield path / "readme.txt", "must end in one of .safetensors, .bin, .pt, .pth, .json"


def test_files_that_are_no_checkpoints(tmp_path):
    for path, words in folders(tmp_path):
        assert words in refusal(on_meta(layers), checkpoint=path)


class Evil:
    def __reduce__(self):
        return print, ("code from a file was run",)


def test_no_code_of_a_file_is_run(tmp_path, capsys):
    torch.save({"0.weight": Evil()}, tmp_path / "a.pt")
    assert "a.pt cannot be read (UnpicklingError" in refusal(on_meta(layers), checkpoint=tmp_path / "a.pt")
    assert "was run" not in capsys.readouterr().out


def test_measured_costs_need_weights():
    assert "on the meta device" in refusal(on_meta(layers), cost="measured")
    assert "on the meta device" in refusal(on_meta(layers), profile=True)


def test_the_reference_needs_weights():
    with pytest.raises(FxChimeraError, match=r"4 parameters are on the meta device, '0\.weight' first"):
        fxchimera.reference(on_meta(layers), torch.ones(4, WIDTH), loss_fn=torch.mean, num_stages=2, n_microbatches=2)
