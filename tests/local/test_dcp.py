"""torch.distributed.checkpoint works with the entries that a process owns; our own format is for what it does not promise."""

from __future__ import annotations

import torch.distributed.checkpoint as dcp

from tests.parity import assert_same_tensors
from tests.saving import Saver


def test_owned_entries_go_through_torchs_checkpoints(tmp_path):
    """Saved at four stages, loaded in place at two, as torchtitan users do."""
    one, other = Saver(4), Saver(2)
    one.train(1)
    dcp.save(one.pipe.state_dict(full=False), checkpoint_id=tmp_path, no_dist=True)
    dcp.load(other.pipe.state_dict(full=False), checkpoint_id=tmp_path, no_dist=True)
    assert_same_tensors(other.pipe.state_dict(), one.pipe.state_dict())
    one.pipe.close()
    other.pipe.close()
