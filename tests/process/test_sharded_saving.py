"""Checkpoints of sharded stages: training goes on bitwise, and any other layout loads them, as this one loads any other's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import sharded_saving
from tests.parity import assert_same_tensors
from tests.process.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("kind", "schedule"), [("dp", "1f1b"), pytest.param("tp", "zbv", marks=pytest.mark.matrix)])
def test_training_goes_on_and_other_layouts_load_it(processes: Pool, tmp_path: Path, kind: str, schedule: str) -> None:
    folder, other = tmp_path / "sharded", tmp_path / "plain"
    plain = sharded_saving.on_threads(2, other, save=True)
    ranks = processes.run(4, sharded_saving.resumed, kind, schedule, str(folder), str(other))
    for answer in ranks:
        assert answer["sharded"]
        assert_same_tensors(answer["resumed"], answer["straight"])
    (saved, *again) = [answer["saved"] for answer in ranks if answer["saved"]]  # one of each pipeline
    for state in again:
        assert_same_tensors(state, saved)
    for answer in ranks:
        if answer["other"]:
            assert_same_tensors(answer["other"], plain)
    writers = {
        name.split("-")[2] for name in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    }
    assert writers == {"rank00000", "rank00001"}
    assert len(list(folder.iterdir())) == 5, "the other pipeline writes nothing"
    for stages in (1, 2, 4):
        assert_same_tensors(sharded_saving.on_threads(stages, folder), saved)


@pytest.mark.matrix
def test_what_one_rank_cannot_do_is_an_error_on_all(processes: Pool, tmp_path: Path) -> None:
    for damaged, full, same in processes.run(4, sharded_saving.refused, "dp", str(tmp_path / "checkpoint")):
        assert damaged[0] == full[0] == "FxChimeraError"
        assert "is damaged" in damaged[1]
        assert "No space left" in full[1]
        assert same


@pytest.mark.matrix
def test_one_kind_of_sharding_loads_the_other(processes: Pool, tmp_path: Path) -> None:
    first = processes.run(4, sharded_saving.resumed, "tp", "1f1b", str(tmp_path / "tp"))
    later = processes.run(4, sharded_saving.resumed, "dp", "1f1b", str(tmp_path / "dp"), str(tmp_path / "tp"))
    saved = next(answer["saved"] for answer in first if answer["saved"])
    for answer in later:
        if answer["other"]:
            assert_same_tensors(answer["other"], saved)
