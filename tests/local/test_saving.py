"""Checkpoints: training goes on from one as if it had never ended, and nothing but a whole one is ever loaded."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fxchimera
from fxchimera import FxChimeraError
from tests.parity import assert_same_tensors
from tests.saving import LAYERS, Saver, net, run


@pytest.fixture(scope="module")
def uninterrupted():
    return run(4, 4, None, False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    losses, state, _ = run(4, 2, folder, False, save=True)
    return folder, losses, state


@pytest.mark.parametrize("stages", [2, 4, pytest.param(8, marks=pytest.mark.matrix)])
def test_training_goes_on_at_another_number_of_stages(uninterrupted, saved, stages):
    """Dropout, batch norm, tied weights, two groups and a scheduler: bitwise the run that was never interrupted."""
    folder, first, _ = saved
    losses, state, moments = run(stages, 2, folder, True)
    assert all(map(torch.equal, [*first, *losses], uninterrupted[0]))
    assert_same_tensors(state, uninterrupted[1])
    for name, own in uninterrupted[2].items():
        assert_same_tensors(moments[name], own)


def test_one_rank_loads_it(saved):
    assert_same_tensors(run(1, 0, saved[0], True)[1], saved[2])


def read(folder):
    """All tensors of a checkpoint, as anybody reads one: by its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def test_the_plain_model_loads_it(saved):
    folder, _, state = saved
    found = read(folder)
    assert found.keys() == net().state_dict().keys()
    assert_same_tensors(found, state)
    net().load_state_dict(found, strict=True)


def test_a_model_on_the_meta_device_begins_with_it(saved):
    folder, _, state = saved
    with torch.device("meta"):
        model = net()
    x = torch.randn(8, 6)
    fxchimera.pipeline(
        model, example_args=(x,), loss_fn=torch.mean, num_stages=2, n_microbatches=2, schedule="1f1b", checkpoint=folder
    ).close()
    assert_same_tensors(dict(model.state_dict()), state)


def test_a_save_replaces_the_one_before(tmp_path):
    one = Saver(2)
    one.save(tmp_path)
    before = set(os.listdir(tmp_path))
    one.train(1)
    one.save(tmp_path)
    after = set(os.listdir(tmp_path))
    assert len(after) == 3  # model, optimizer (nothing was in it before the first step), index
    assert before & after == {"model.safetensors.index.json"}
    assert_same_tensors(read(tmp_path), one.pipe.state_dict())
    one.pipe.close()


@pytest.mark.parametrize(
    "moment",
    [
        "fxchimera.runtime.weights.savedindex.os.replace",
        "fxchimera.runtime.weights.savedfiles.save_file",
    ],
)
def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch, moment):
    one = Saver(2)
    one.train(1)
    one.save(tmp_path)
    wanted, files = read(tmp_path), set(os.listdir(tmp_path))
    one.train(1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(moment, full)
    with pytest.raises(FxChimeraError, match="No space left"):
        one.save(tmp_path)
    monkeypatch.undo()
    assert files <= set(os.listdir(tmp_path)) <= {*files, "model.safetensors.index.json.tmp"}
    assert_same_tensors(read(tmp_path), wanted)
    one.load(tmp_path)
    assert_same_tensors(one.pipe.state_dict(), wanted)
    one.pipe.close()


def flipped(path, place):
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 4
    path.write_bytes(bytes(content))


def test_damage_is_refused_and_nothing_changes(tmp_path):
    one = Saver(2)
    one.train(1)
    one.save(tmp_path)
    one.train(1)
    before = {name: value.clone() for name, value in one.pipe.state_dict().items()}
    moments = {n: {key: v.clone() for key, v in own.items()} for n, own in one.optimizer.state_dict()["state"].items()}
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for place in (5, 60, len(whole) // 2, -9):
            flipped(path, place)
            with pytest.raises(FxChimeraError):
                one.load(tmp_path)
            path.write_bytes(whole)
        path.write_bytes(whole[:-8])
        with pytest.raises(FxChimeraError):
            one.load(tmp_path)
        path.write_bytes(whole)
    assert_same_tensors(one.pipe.state_dict(), before)
    for number, own in one.optimizer.state_dict()["state"].items():
        assert_same_tensors(own, moments[number])
    one.load(tmp_path)
    one.pipe.close()


def refusal(call, *args, **kwargs):
    with pytest.raises(FxChimeraError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_what_does_not_fit_is_refused(tmp_path, saved):
    folder = saved[0]
    one = Saver(2, layers=LAYERS - 1)
    assert "that the model lacks (11.linear.bias, 11.linear.weight" in refusal(one.pipe.load, folder)
    assert f"{tmp_path} holds no checkpoint" in refusal(one.pipe.load, tmp_path)
    assert "extra must be made of" in refusal(one.pipe.save, tmp_path / "a", extra={"x": torch.ones(1)})
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    assert "not one of pipe.parameters()" in refusal(one.pipe.save, tmp_path / "a", optimizer=foreign)
    one.pipe.save(tmp_path / "a")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "has not written; save into another folder" in refusal(one.pipe.save, tmp_path)
    assert "was not written by pipe.save" in refusal(one.pipe.load, tmp_path)
    assert "saved without an optimizer" in refusal(one.pipe.load, tmp_path / "a", optimizer=one.optimizer)
    with one.pipe.no_sync():
        one.pipe.step(one.x, target=one.y)
    assert "save() was called after 1 steps under no_sync()" in refusal(one.pipe.save, tmp_path / "a")
    one.pipe.close()


def test_groups_of_other_options_are_refused(saved):
    one = Saver(2)
    together = torch.optim.AdamW(one.pipe.parameters())
    text = refusal(one.pipe.load, saved[0], optimizer=together)
    assert "in one group, but they were saved with weight_decay 0.1 and 0.0" in text
    one.pipe.close()


def test_weights_alone_may_be_loaded(saved):
    folder, _, state = saved
    one = Saver(2)
    one.pipe.load(folder)
    assert_same_tensors(one.pipe.state_dict(), state)
    one.pipe.close()
