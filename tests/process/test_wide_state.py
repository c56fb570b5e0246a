"""Two pipelines side by side: checkpoints, models from the meta device, ZeRO-1's state, against one pipeline and plain torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import wide_state
from tests.metamodels import llama, tokens
from tests.parity import assert_same_tensors
from tests.process.pool import Pool

pytestmark = pytest.mark.process


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.matrix)


@pytest.mark.parametrize(
    ("schedule", "zero"), [slow("chimera", False), slow("1f1b", True), slow("zbv", False), slow("chimera", True)]
)
def test_training_goes_on_from_a_checkpoint(processes: Pool, tmp_path: Path, schedule: str, zero: bool) -> None:
    """Dropout, batch norm and tied weights; the first pipeline's ranks write."""
    answers = processes.run(4, wide_state.go_on, str(tmp_path / "c"), schedule, zero)
    for answer in answers:
        assert all(map(torch.equal, answer["losses"][2:], answer["again"]))
        assert_same_tensors(answer["found"], answer["wanted"])
        assert answer["extra"] == {"at": 0}
    for first, second in zip(answers[:2], answers[2:], strict=True):
        assert_same_tensors(first["found"], second["found"])
    for stages in (1, 4):
        assert_same_tensors(wide_state.save_or_load(1, tmp_path / "c", stages=stages)["state"], answers[0]["saved"])


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [False, True])
def test_one_pipeline_s_checkpoint_goes_on_as_two(processes: Pool, tmp_path: Path, zero: bool) -> None:
    """And then as the two did that have saved it: the optimizer's state is the same however it is kept."""
    saved = wide_state.save_or_load(1, tmp_path, save=True)
    answers = processes.run(4, partial(wide_state.save_or_load, 2, str(tmp_path), zero=zero))
    plain = processes.run(4, partial(wide_state.save_or_load, 2, str(tmp_path)))
    assert_same_tensors(answers[0]["state"], saved["state"])
    for answer, other in zip(answers, plain, strict=True):
        assert_same_tensors(answer["owned"], other["owned"])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["checkpoint", "initialisation", "function"])
@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_models_from_the_meta_device(processes: Pool, tmp_path: Path, kind: str, schedule: str) -> None:
    """Each rank has its own stage's weights only, both pipelines the same; two steps are those of plain torch on all rows."""
    torch.manual_seed(0)
    if kind == "checkpoint":
        llama(tied=True).save_pretrained(tmp_path, max_shard_size="6KB")
    answers = processes.run(4, wide_state.begin, kind, str(tmp_path), schedule)
    start = answers[0]["start"]
    for first, second in zip(answers[:2], answers[2:], strict=True):
        assert first["real"] == first["names"] == second["names"] == second["real"]
        assert_same_tensors(first["begun"], second["begun"])
        assert_same_tensors(first["owned"], second["owned"])
    for answer in answers:
        assert answer["verified"][0], answer["verified"][1]
        assert all(map(torch.equal, answer["losses"], answers[0]["losses"]))
    plain, x = llama(tied=True).train(), tokens()
    if kind == "checkpoint":
        torch.manual_seed(0)
        assert_same_tensors(start, llama(tied=True).state_dict())
    if kind == "function":
        assert all(bool((value == 0.5).all()) for value in start.values())
    plain.load_state_dict(start)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for loss in answers[0]["losses"]:
        wanted = plain(input_ids=x, labels=x).loss
        torch.testing.assert_close(loss, wanted.detach(), rtol=2e-5, atol=0.0)
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
