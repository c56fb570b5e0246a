"""Checkpoints of ranks that are processes: written by four, loaded by two, threads or one, and never half of a save."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from tests.parity import assert_same_tensors
from tests.saving import die_at, die_in_save, run

pytestmark = pytest.mark.process


def test_four_ranks_save_and_others_go_on(processes, tmp_path):
    """The witness is the run of threads that was never interrupted; its weights and moments are met bitwise."""
    wanted = run(4, 4, None, False, schedule="chimera")
    first = processes.run(4, partial(run, save=True, schedule="chimera"), 4, 2, tmp_path, False)
    assert len(list(tmp_path.glob("model-*-rank*.safetensors"))) == 4
    later = processes.run(4, partial(run, schedule="chimera"), 4, 2, tmp_path, True)
    assert all(map(torch.equal, [*first[0][0], *later[0][0]], wanted[0]))
    assert_same_tensors(later[0][1], wanted[1])
    moments = {name: own for rank in later for name, own in rank[2].items()}
    for name, own in wanted[2].items():
        assert_same_tensors(moments[name], own)
    two = processes.run(2, run, 2, 0, tmp_path, True)
    assert_same_tensors(two[0][1], first[0][1])


def test_a_rank_that_dies_leaves_the_save_before(processes, tmp_path):
    wanted = run(2, 1, None, False)[1]
    with pytest.raises(pytest.fail.Exception):  # a process that dies is reported so
        processes.run(2, die_in_save, tmp_path, spoils=True)
    assert len(list(tmp_path.glob("model-*-rank*.safetensors"))) == 4  # of two saves
    assert_same_tensors(run(2, 0, tmp_path, True)[1], wanted)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_rank_killed_at_any_time_of_a_save_leaves_a_whole_one(processes, tmp_path):
    first, second = (run(2, steps, None, False)[1:] for steps in (1, 2))
    chosen = random.Random(4)
    found = []
    for trial in range(20):
        folder = tmp_path / f"trial{trial}"
        with pytest.raises(pytest.fail.Exception):
            processes.run(2, die_at, folder, trial % 2, chosen.uniform(0.0, 0.15), spoils=True)
        _, state, moments = run(2, 0, folder, True)
        same = [all(torch.equal(state[name], wanted[name]) for name in wanted) for wanted, _ in (first, second)]
        assert any(same)
        for name, own in (first, second)[same.index(True)][1].items():
            assert_same_tensors(moments[name], own)
        found.append(same.index(True))
    assert 1 in found
