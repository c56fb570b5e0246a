"""Lent parameters, empty stages and whole models as real gloo processes: bitwise what ranks as threads give."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from tests import coarse
from tests.parity import assert_same_tensors
from tests.process.pool import Pool

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]


def local(*args: Any, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return coarse.train(*args, **options)


@pytest.mark.parametrize(("kind", "n", "schedule"), [("recurrent", 3, "chimera"), ("numpy", 3, "chimera"), ("inner", 2, "1f1b")])
def test_processes_are_bitwise_equal_to_threads(processes: Pool, kind: str, n: int, schedule: str) -> None:
    """Optimizers on every rank, another batch size, gathered state; and the state of four stages goes on at two."""
    expected = local(kind, 4, n, schedule)
    ranks = processes.run(4, coarse.train, kind, 4, n, schedule)
    assert all(answer["gradients"] for answer in ranks)
    found = {name: gradient for answer in ranks for name, gradient in answer["gradients"].items()}
    assert_same_tensors({name: found[name] for name in expected["gradients"]}, expected["gradients"])
    assert sum(len(answer["gradients"]) for answer in ranks) == len(found)
    for answer in ranks:
        assert all(map(torch.equal, answer["losses"], expected["losses"]))
        assert answer["verified"], answer["text"]
    assert_same_tensors(ranks[0]["state"], expected["state"])
    assert all(answer["state"] == {} for answer in ranks[1:])
    two = processes.run(2, partial(coarse.train, kind, 2, n, schedule, state=expected["state"]))
    assert_same_tensors(two[0]["state"], local(kind, 2, n, schedule, state=expected["state"])["state"])
