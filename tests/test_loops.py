"""The scripts of tutorials/loops: each trains to the losses and weights of a loop of plain torch, written here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "tutorials" / "loops"
RATE = 1e-2


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script as Python does when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def groups(model: nn.Module) -> list[dict[str, object]]:
    """What decays (matrices) and what does not."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def trained(
    model: nn.Module, batches: list[Tensor], held_out: Tensor, *, accumulate: int = 1, rate: Callable[[int], float] = lambda _: 1.0
) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses of the batches, the validation loss and the state, by plain torch on whole batches; ``rate`` of an update's number."""
    optimizer = torch.optim.AdamW(groups(model), lr=RATE)
    losses = []
    for number, tokens in enumerate(batches):
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = RATE * rate(number // accumulate)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        validation = model(input_ids=held_out, labels=held_out).loss.item()
    return losses, validation, model.state_dict()


def assert_same(
    found: tuple[list[float], float, dict[str, Tensor]], expected: tuple[list[float], float, dict[str, Tensor]]
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=2e-4)


def test_plain(script: Callable[[str], ModuleType]) -> None:
    plain = script("plain")
    model, batches, held_out = plain.make_model(), plain.make_batches(8), plain.make_batches(1, seed=1)[0]

    def cosine(update: int) -> float:
        return float((1 + torch.cos(torch.tensor(torch.pi * update / 4))) / 2)

    losses, validation, state = trained(model, batches, held_out, accumulate=2, rate=cosine)
    pairs = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert_same(plain.train(), (pairs, validation, state))


def test_hf_trainer(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Against transformers' own Trainer on the plain model: two batches an update, with unequal numbers of labels that count."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")
    from transformers import GPT2LMHeadModel, Trainer

    plain, loop = script("plain"), script("hf_trainer")
    rows = {"train_dataset": loop.make_rows(6, 0), "eval_dataset": loop.make_rows(1, 1)}
    trainer = Trainer(plain.make_model(), loop.make_arguments(str(tmp_path / "plain")), **rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    validation, state = trainer.evaluate()["eval_loss"], trainer.model.state_dict()
    assert len(losses) == 3
    assert_same(loop.train(str(tmp_path / "piped")), (losses, validation, state))
    torch.testing.assert_close(GPT2LMHeadModel.from_pretrained(tmp_path / "piped").state_dict(), state, rtol=1e-4, atol=2e-4)


def test_accelerate(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    plain, loop = script("plain"), script("accelerate_loop")
    expected = trained(plain.make_model(), plain.make_batches(8), plain.make_batches(1, seed=1)[0], accumulate=2)
    assert_same(loop.train(str(tmp_path)), expected)


def test_lightning(script: Callable[[str], ModuleType]) -> None:
    try:
        importlib.import_module("lightning.pytorch")
    except ModuleNotFoundError:
        pytest.importorskip("pytorch_lightning", reason="neither lightning nor pytorch_lightning is installed")
    plain, loop = script("plain"), script("lightning_loop")
    expected = trained(plain.make_model(), plain.make_batches(4), plain.make_batches(1, seed=1)[0])
    assert_same(loop.train(), expected)
