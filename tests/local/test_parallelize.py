"""What ``parallelize`` is given, and what it may not do; tests/process has the meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxchimera
from fxchimera.runtime.weights.parallelize import blocks_of
from tests import sharding


def test_every_stage_is_given_once_under_the_models_own_names() -> None:
    seen: dict[int, list[str]] = {}
    calls: list[str] = []

    def parallelize(stage_module: nn.Module, *, stage: int, device: torch.device) -> None:
        seen[stage] = sorted(name for name, _ in stage_module.named_parameters())
        for block in stage_module.blocks.children():  # type: ignore[union-attr]
            block.register_forward_hook(lambda *_: calls.append("block"))
        stage_module.register_forward_hook(lambda *_: calls.append("stage"))

    x, y = sharding.data()
    model, plain = sharding.build(), sharding.build()
    options: dict[str, Any] = {"num_stages": 2, "n_microbatches": 2, "schedule": "1f1b"}
    with fxchimera.pipeline(model, example_args=(x,), loss_fn=F.mse_loss, parallelize=parallelize, **options) as pipe:
        loss = pipe.step(x, target=y)
    F.mse_loss(plain(x), y).backward()
    assert sorted(name for names in seen.values() for name in names) == sorted(name for name, _ in plain.named_parameters())
    assert (calls.count("stage"), calls.count("block")) == (2 * 2, 4 * 2)
    torch.testing.assert_close(loss, F.mse_loss(plain(x), y), rtol=1e-12, atol=0.0)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_what_cannot_run_is_refused() -> None:
    words = [
        "one copy of each stage", "'blocks.0.up.weight' is read by the stages", "returned a Sequential for stage", "'blocks.0'",
        "'scale' of stage 1", "torch.float32 after parallelize", "module.compile()", "profile=True", "recompute='full'",
    ]  # fmt: skip
    for (kind, text, _), expected in zip(sharding.refusals(), words, strict=True):
        assert kind == "FxChimeraError"
        assert expected in text


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))})
    assert blocks_of(encoder) == ("layers.0", "layers.1")
    assert blocks_of(model) == ("a",)
    assert blocks_of(nn.Linear(2, 2)) == ()
