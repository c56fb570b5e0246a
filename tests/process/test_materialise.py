"""Ranks that are processes fetch their own stages' weights only, and train as threads do."""

from __future__ import annotations

import pytest
import torch

from tests.metamodels import llama
from tests.parity import assert_same_tensors
from tests.process.metaworkers import left_alive, train_meta, wrap_large

pytestmark = pytest.mark.process


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_each_rank_holds_what_it_owns(processes, tmp_path, schedule):
    """From a sharded checkpoint; the threads' run, which the local tests compare with the plain model, is the witness."""
    torch.manual_seed(0)
    plain = llama(tied=True)
    plain.save_pretrained(tmp_path, max_shard_size="6KB")
    wanted = train_meta(4, schedule, tmp_path)
    ranks = processes.run(4, train_meta, 4, schedule, tmp_path)
    assert_same_tensors(ranks[0]["start"], plain.state_dict())
    owned = [name for rank in ranks for name in rank["owned"]]
    assert sorted(owned) == sorted(name for name, _ in plain.named_parameters())  # each on one rank
    for rank in ranks:
        assert rank["real"] == rank["owned"]
        assert rank["buffers"]
        assert rank["tied"]
        assert all(map(torch.equal, rank["losses"], wanted["losses"]))
        assert torch.equal(rank["evaluated"], wanted["evaluated"])
    assert_same_tensors(ranks[0]["state"], wanted["state"])


def test_initialisation_does_not_depend_on_the_number_of_ranks(processes):
    two, four = (processes.run(stages, train_meta, stages, "1f1b", None)[0] for stages in (2, 4))
    assert_same_tensors(two["start"], four["start"])
    assert_same_tensors(train_meta(1, "gpipe", None)["start"], two["start"])


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_what_other_ranks_own_is_freed(processes, schedule):
    """A model made with weights is whole on every rank at first; an LSTM keeps a list of its parameters beside them."""
    for away, alive in processes.run(4, left_alive, schedule):
        assert away
        assert alive == []


@pytest.mark.matrix
@pytest.mark.parametrize("source", ["checkpoint", "initialisation"])
def test_a_rank_needs_memory_for_its_own_stages(processes, tmp_path, source):
    """Eight equal layers on four ranks: a quarter of the weights each, and at most a tenth more on the way there."""
    width, layers = 1280, 8
    if source == "checkpoint":
        llama(tied=False, width=width, layers=layers).save_pretrained(tmp_path)
    folder = tmp_path if source == "checkpoint" else None
    # in processes of their own: memory that an earlier call has freed would be used again without growing
    for total, most in processes.run(4, wrap_large, folder, width, layers, limit=250, spoils=True):
        assert total > 200 * 2**20
        assert most / total <= 0.35
