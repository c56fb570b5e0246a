"""Measuring between processes: every rank has its own stages, and all ranks come to the same figures and the same plan."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests import profiling
from tests.local.toys import data, plain, seeded
from tests.local.wrapped import reference
from tests.models import MODELS
from tests.parity import Outcome, assert_bitwise, assert_close, assert_same_tensors
from tests.process.alike import union
from tests.process.pool import Pool
from tests.sleeping import BACKWARD, FORWARD, slow_chain

pytestmark = pytest.mark.process


def test_ranks_measure_their_stages_and_agree(processes: Pool) -> None:
    """Two copies of each stage, dropout: figures and plan are the same everywhere, and the step is the reference's."""
    parts = processes.run(4, profiling.measured_and_trained, "mlp", 4, 4, "chimera")
    expected = reference(MODELS["mlp"](batch=8, dropout=0.1), 4, 4)
    for part in parts:
        assert (part["profile"], part["plan"], part["shown"]) == (parts[0]["profile"], parts[0]["plan"], parts[0]["shown"])
        assert_same_tensors(part["after"], part["before"])
        assert not any(gradient is not None for gradient in part["untouched"].values())
    found = union([part["gradients"] for part in parts])
    assert_bitwise(Outcome(parts[0]["loss"], {name: found[name] for name in expected.gradients}), expected)
    profile = parts[0]["profile"]
    assert [link.ranks for link in profile.links] == [(0, 1), (1, 2), (2, 3)]
    assert all(link.small > 0.0 and link.large > 0.0 for link in profile.links)
    assert not profile.shared
    assert len(profile.stages) == 4
    assert "measured" in parts[0]["shown"]


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_plan_made_anew_is_the_same_everywhere(processes: Pool, schedule: str) -> None:
    """The long sleep is alone, though a formula would cut in the middle; no rank has lost weights of its stage to the first cut."""
    parts = processes.run(2, profiling.planned_anew, schedule)
    x, y = data(8)
    expected = plain(seeded(lambda: slow_chain(4.0, 0.2, 0.2, 0.2)), lambda model: F.mse_loss(model(x), y))
    found = union([part["gradients"] for part in parts])
    assert_close(Outcome(parts[0]["loss"], {name: found[name] for name in expected.gradients}), expected, 1e-12)
    for part in parts:
        assert part["plan"] == parts[0]["plan"]
        assert (part["recordings"], part["world"]) == (0, 2)
        assert part["latency"] > 0.0
    if schedule == "1f1b":  # where both directions share the ranks, a cut does not decide who is busy
        assert [name for name in parts[0]["nodes"][0] if "apply_sleep" in name] == ["apply_sleep"]
    costs = parts[0]["plan"][2]
    assert sum(costs.forward) >= 4.6 * FORWARD  # what was measured is shared out anew, and stays the same together
    assert sum(costs.backward) >= 4.6 * BACKWARD


def test_ranks_that_differ_are_told(processes: Pool) -> None:
    for rounds, calls, measured in processes.run(2, profiling.differ):
        assert rounds[0] == "FxChimeraError"
        assert "the ranks passed [1, 2]" in rounds[1]
        assert calls[0] == "FxChimeraError"
        assert "rank 0: profile()" in calls[1]
        assert "rank 1: the start of a step" in calls[1]
        assert measured > 0.0


def test_a_stage_that_cannot_be_timed_stops_every_rank(processes: Pool) -> None:
    for (name, message, seconds), left in processes.run(2, profiling.broken_backward):
        assert name == "PipelineError"
        assert "rank 1 failed: profile(), stage 1, forward and backward: ValueError: planted mistake" in message
        assert seconds < 20.0
        assert left == []
