"""Ranks as real gloo processes: bitwise what ranks as threads give, and clear errors on every rank.

The witness of a process run is the local run of the same function, which tests/local compares with plain torch.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fxchimera_passes.structure import flatten
from tests import workers
from tests.models import MODELS
from tests.parity import assert_same_tensors
from tests.process.alike import assert_trained_as_by_threads, union
from tests.process.pool import Pool

pytestmark = pytest.mark.process

# name, D, N, schedule: every model once, both D, even and uneven N, with and without a second direction
CELLS = [
    ("mlp", 2, 2, "chimera"), ("gpt2", 4, 4, "chimera"), ("bert", 2, 5, "1f1b"), ("vit", 4, 9, "1f1b"),
    ("nn_transformer", 4, 2, "chimera"), ("resnet", 4, 5, "chimera"), ("skip", 4, 1, "gpipe"), ("masked_rotary", 2, 3, "chimera"),
    ("tied", 4, 9, "chimera"),
]  # fmt: skip


def matrix() -> list[Any]:
    cells = [
        (name, stages, n, schedule)
        for name, stages, schedule in itertools.product(MODELS, (2, 4), ("chimera", "1f1b"))
        for n in (1, stages, 2 * stages, 2 * stages + 1)
    ]
    return [pytest.param(*cell, marks=pytest.mark.matrix) for cell in cells if cell not in CELLS]


@pytest.mark.parametrize(("name", "stages", "n", "schedule"), [*CELLS, *matrix()])
def test_processes_are_bitwise_equal_to_threads(processes: Pool, name: str, stages: int, n: int, schedule: str) -> None:
    """Three AdamW steps with clipping and dropout: losses, norms, gradients and the trained state."""
    assert_trained_as_by_threads(processes, name, stages, n, schedule)


def test_owners_overwrite_mirrors_when_seeds_differ(processes: Pool) -> None:
    """Weights built from another seed on every rank: stage s counts on rank s, and both copies of it follow."""
    first = processes.run(4, partial(workers.train, "mlp", 4, 4, "chimera", skew=True))[0]
    seeds = [MODELS["mlp"](seed=seed, dropout=0.2).model.state_dict() for seed in range(4)]
    assert_same_tensors(first["start"], {key: seeds[first["owner"][key]][key] for key in seeds[0]})
    expected = workers.train("mlp", 4, 4, "chimera", state=first["start"])
    assert all(map(torch.equal, first["losses"], expected["losses"]))
    assert_same_tensors(first["state"], expected["state"])


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_forward_and_evaluation_give_every_rank_the_same(processes: Pool, name: str) -> None:
    output, loss = workers.forward(name, 2, 3)
    for found_output, found_loss in processes.run(2, workers.forward, name, 2, 3):
        found, expected = flatten(found_output)[0], flatten(output)[0]
        assert all(map(torch.equal, found, expected))
        assert torch.equal(found_loss, loss)


def test_verify_over_processes(processes: Pool) -> None:
    answers = processes.run(4, workers.verify, "gpt2", 4, 5)
    assert all(bitwise for bitwise, _ in answers), answers[0][1]
    assert len(set(answers)) == 1


@pytest.mark.parametrize("name", ["tied", "resnet"])
def test_no_sync_over_processes(processes: Pool, name: str) -> None:
    expected = workers.no_sync(name, 4, 4)
    answers = processes.run(4, workers.no_sync, name, 4, 4)
    for answer in answers:
        assert all(map(torch.equal, answer["losses"], expected["losses"]))
    assert_same_tensors(union([answer["gradients"] for answer in answers]), expected["gradients"])
    assert_same_tensors(answers[0]["buffers"], expected["buffers"])


def test_evaluation_before_and_between_changes_nothing(processes: Pool) -> None:
    """P18, with another batch size in between."""
    expected = processes.run(2, workers.evaluate_between, "resnet", 2, 4, "TTT")
    found = processes.run(2, workers.evaluate_between, "resnet", 2, 4, "ETOTET")
    assert all(map(torch.equal, found[0]["trained"], expected[0]["trained"]))
    assert_same_tensors(found[0]["state"], expected[0]["state"])
    assert all(map(torch.equal, found[0]["evaluated"], found[1]["evaluated"]))


def test_unowned_parameters_are_meta_tensors(processes: Pool) -> None:
    answers = processes.run(4, workers.unowned_parameters, "tied", 4)
    owned = [key for _, keys, _ in answers for key in keys]
    assert sorted(owned) == sorted(key for key, _ in MODELS["tied"]().model.named_parameters())
    for metas, keys, (error, _, _) in answers:
        assert keys
        assert {key for key, is_meta in metas.items() if not is_meta} == set(keys)
        assert error in ("NotImplementedError", "RuntimeError"), "a stale use of the plain model must fail loudly"


def test_state_at_four_stages_loads_at_two_and_back(processes: Pool) -> None:
    expected = MODELS["resnet"](seed=3).model.state_dict()
    four = processes.run(4, workers.exercise_state, "resnet", 4, expected)
    two = processes.run(2, workers.exercise_state, "resnet", 2, four[0][0])
    again = processes.run(4, workers.exercise_state, "resnet", 4, two[0][0])
    for answers in (four, two, again):
        assert_same_tensors(answers[0][0], expected)
        assert all(full == {} for full, _, _ in answers[1:])
        assert_same_tensors(union([owned for _, owned, _ in answers]), expected)
        for _, _, (error, text, _) in answers:
            assert error == "FxChimeraError"
            assert "nonsense" in text
    nn.Module.load_state_dict(MODELS["resnet"]().model, again[0][0], strict=True)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("kind", ["rows", "width", "dtype", "too few rows"])
def test_ranks_with_different_batches_are_refused_before_anything_is_sent(processes: Pool, kind: str) -> None:
    zero, one = processes.run(2, workers.differ_in_batch, kind)
    for error, text, seconds in (zero, one):
        assert error in ("BatchError", "CaptureError"), text
        assert seconds < 5.0
    assert zero[0] == "BatchError"
    assert "rank" in zero[1]
    assert {"rows": "[2, 16]", "width": "", "dtype": "float64", "too few rows": "2 rows"}[kind] in zero[1]


def test_ranks_that_make_different_calls_are_told(processes: Pool) -> None:
    for error, text, seconds in processes.run(2, workers.call_differently):
        assert error == "BatchError"
        assert "step" in text
        assert "evaluate" in text
        assert seconds < 5.0


@pytest.mark.parametrize("kind", ["model", "options"])
def test_ranks_with_different_models_are_refused_at_wrap(processes: Pool, kind: str) -> None:
    for error, text, seconds in processes.run(2, workers.differ_in_model, kind, spoils=True):
        assert error == "FxChimeraError"
        assert "ranks [1]" in text
        assert seconds < 5.0


@pytest.mark.parametrize("_time", range(3))
def test_wrong_world_size_is_refused_and_no_group_left(processes: Pool, _time: int) -> None:
    """Before anybody joins: a rank that joined and left at once would break the joining of the others."""
    for (error, text, seconds), group_left in processes.run(2, workers.wrong_world, 4):
        assert error == "FxChimeraError"
        assert "4 ranks" in text
        assert "world of 2" in text
        assert seconds < 5.0
        assert not group_left


@pytest.mark.parametrize(("schedule", "bad_rank", "bad_call"), [("1f1b", 1, 6), ("chimera", 0, 1), ("chimera", 3, 9)])
def test_a_mistake_of_the_user_on_one_rank_reaches_all(processes: Pool, schedule: str, bad_rank: int, bad_call: int) -> None:
    answers = processes.run(4, workers.fail_in_hook, 4, schedule, bad_rank, bad_call, spoils=True)
    texts = {answer["first"][1] for answer in answers}
    assert len(texts) == 1, "every rank names the same cause"
    (text,) = texts
    assert text.startswith(f"rank {bad_rank} failed")
    assert "ValueError: planted mistake" in text
    assert "micro-batch" in text
    assert "stage" in text
    for answer in answers:
        assert answer["first"][0] == answer["again"][0] == "PipelineError"
        assert answer["first"][2] < 5.0
        assert answer["again"][2] < 1.0
        assert_same_tensors(answer["after"], answer["before"])


def test_a_group_of_the_users_is_adopted_and_left_alone(processes: Pool) -> None:
    for alive, threads, total, refused in processes.run(2, workers.adopted_group):
        assert alive
        assert all(error == "FxChimeraError" and "closed" in text for error, text, _ in refused)
        assert threads == []
        assert total == 2.0


# ---------------------------------------------------------------------- the pool itself


def test_a_hang_fails_its_own_test_and_says_where(processes: Pool) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 0 ended well.*rank 1 has not answered.*in hang"):
        processes.run(2, workers.hang, limit=1.0)
    assert processes.run(2, workers.rank) == [0, 1]
