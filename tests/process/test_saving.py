"""Checkpoints of ranks that are processes: written by four, loaded by two, threads or one, and never half of a save."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.parity import assert_same_tensors
from tests.saving import die_in_save, run

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
