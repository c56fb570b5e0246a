"""Ranks as real gloo processes: bitwise what ranks as threads give, and clear errors on every rank.

The witness of a process run is the local run of the same function, which tests/local compares with plain torch.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests import workers
from tests.models import MODELS
from tests.parity import assert_same_tensors
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


def union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The owned entries of all ranks; nobody owns what another does."""
    assert sum(map(len, parts)) == len({key for part in parts for key in part})
    return {key: value for part in parts for key, value in part.items()}


@pytest.mark.parametrize(("name", "stages", "n", "schedule"), [*CELLS, *matrix()])
def test_processes_are_bitwise_equal_to_threads(processes: Pool, name: str, stages: int, n: int, schedule: str) -> None:
    """Three AdamW steps with clipping and dropout: losses, norms, gradients and the trained state."""
    expected = workers.train(name, stages, n, schedule)
    ranks = processes.run(stages, workers.train, name, stages, n, schedule)
    for answer in ranks:
        assert all(map(torch.equal, answer["losses"], expected["losses"]))
        assert all(map(torch.equal, answer["norms"], expected["norms"]))
        assert answer["threads"] == []
    assert_same_tensors(union([answer["gradients"] for answer in ranks]), expected["gradients"])
    assert_same_tensors(ranks[0]["state"], expected["state"])
    assert all(answer["state"] == {} for answer in ranks[1:])


def test_owners_overwrite_mirrors_when_seeds_differ(processes: Pool) -> None:
    """Weights built from another seed on every rank: stage s counts on rank s, and both copies of it agree."""
    first, *_ = processes.run(4, _skewed)
    for key, value in first["start"].items():
        owner = first["owner"][key]
        assert torch.equal(value, MODELS["mlp"](seed=owner).model.state_dict()[key]), key
    local = workers.train("mlp", 4, 4, "chimera", state=first["start"])
    assert all(map(torch.equal, first["losses"], local["losses"]))


def _skewed() -> dict[str, Any]:
    example = MODELS["mlp"](batch=9, dropout=0.2)
    example = example._replace(model=MODELS["mlp"](seed=workers.rank(), dropout=0.2).model)
    with workers.wrap(example, 4, 4) as pipe:
        start = pipe.state_dict()
        owner = {name: stage.index for stage in pipe.plan.stages for name in stage.owned}
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            losses.append(workers.step(pipe, example))
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {"start": start, "owner": owner, "losses": losses}
