"""torch's own tools when ranks are processes: bitwise what threads give, which tests/local compares with the plain model."""

from __future__ import annotations

import pytest
import torch

from fxchimera.schedule.families import make_order
from tests import tools
from tests.parity import assert_same_tensors
from tests.process.alike import union
from tests.process.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("stages", "schedule"), [(2, "chimera"), pytest.param(2, "zbv", marks=pytest.mark.matrix)])
def test_the_profiler_of_a_process_sees_its_actions(processes: Pool, stages: int, schedule: str) -> None:
    ranks = processes.run(stages, tools.profiled, "mlp", stages, 4, schedule)
    computed = [f"PP:{action}" for rank in make_order(schedule, stages, 4).ranks for action in rank]
    for seen, actions in ranks:
        assert seen == actions
    assert sum((seen[name] for seen, _ in ranks for name in set(computed))) == len(computed)


@pytest.mark.parametrize(("name", "schedule"), [("tied", "chimera"), pytest.param("gpt2", "zbv", marks=pytest.mark.matrix)])
def test_training_in_autocast(processes: Pool, name: str, schedule: str) -> None:
    expected = tools.trained_in_autocast(name, 2, 3, schedule)
    ranks = processes.run(2, tools.trained_in_autocast, name, 2, 3, schedule)
    for answer in ranks:
        assert all(map(torch.equal, answer["losses"], expected["losses"]))
    assert_same_tensors(union([answer["gradients"] for answer in ranks]), expected["gradients"])
    assert_same_tensors(ranks[0]["state"], expected["state"])


@pytest.mark.parametrize(("name", "schedule"), [("mlp", "chimera"), pytest.param("tied", "zbv", marks=pytest.mark.matrix)])
def test_all_ranks_skip_the_same_steps(processes: Pool, name: str, schedule: str) -> None:
    """ShardedGradScaler: an overflow on one rank is an overflow on all."""
    expected = tools.scaled(name, 2, 4, schedule, 7)
    ranks = processes.run(2, tools.scaled, name, 2, 4, schedule, 7)
    for answer in ranks:
        for key in ("scales", "skipped", "losses"):
            assert answer[key] == expected[key]
    assert True in expected["skipped"]
    assert False in expected["skipped"]
    assert_same_tensors(ranks[0]["state"], expected["state"])


@pytest.mark.matrix
def test_compiled_stages(processes: Pool) -> None:
    expected = tools.compiled("tied", 2, 2, "chimera")
    ranks = processes.run(2, tools.compiled, "tied", 2, 2, "chimera")
    assert all(answer["losses"] == expected["losses"] for answer in ranks)
    assert_same_tensors(ranks[0]["state"], expected["state"])
