"""``verify`` over processes and several pipelines: what is wrong on one rank only is named by all, with its pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.exchange import Exchange
from tests import wide
from tests.local.wrapped import wrap
from tests.process.pool import Pool
from tests.workers import rank

pytestmark = pytest.mark.process


def look(kind: str) -> dict[str, tuple[bool, int | None, str]]:
    """Plant one thing on one rank of two pipelines of two stages; what verify says before, with it, and after."""
    example = wide.own_shard("mlp", (6, 5), dtype=torch.float64)
    found = {}
    with wrap(example, 2, 2, "chimera") as pipe:
        forward, refresh = Replica.forward, Exchange.refresh
        owned = dict(pipe.named_parameters())
        for moment in ("before", "with", "after"):
            if moment == "with":
                plant(kind, pipe, owned)
            result = pipe.verify(*example.args, target=example.target)
            found[moment] = (result.ok, result.first_bad_stage, str(result))
            if moment == "with":
                Replica.forward, Exchange.refresh = forward, refresh  # type: ignore[method-assign]
                if kind == "owner" and rank() == 3:
                    with torch.no_grad():
                        owned["30.bias"].sub_(1.0)
    return found


def plant(kind: str, pipe: Any, owned: dict[str, torch.nn.Parameter]) -> None:
    if kind == "forward" and rank() == 2:  # rank 0 of pipeline 1: the up pipe's last stage
        original = Replica.forward

        def forward(self: Replica, *args: Any, **options: Any) -> Any:
            return [output * 2.0 if self.pipe == 1 else output for output in original(self, *args, **options)]

        Replica.forward = forward  # type: ignore[method-assign]
    if kind == "copy" and rank() == 2:
        Exchange.refresh = lambda *_: None  # type: ignore[method-assign]
        for executor in pipe._engine.executors:
            executor.replicas[1, 1].parameters["30.bias"].data += 1.0
    if kind == "owner" and rank() == 3:
        with torch.no_grad():
            owned["30.bias"].add_(1.0)


SAID = {
    "forward": (
        "first stage that differs: 1, in its forward of micro-batch 1 (up) of pipeline 1",
        "WRONG    stage 1  output 1 (up) of pipeline 1",
    ),
    "copy": (
        "DRIFTED  stage 1 (up of pipeline 1)  30.bias: the copy's values are not the owner's",
        "in its forward of micro-batch 1",
    ),
    "owner": ("DRIFTED  stage 1 (down of pipeline 1)  30.bias", "DRIFTED  stage 1 (up of pipeline 1)  30.bias"),
}


@pytest.mark.parametrize("kind", ["copy", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("forward", "owner"))])
def test_what_is_wrong_in_one_pipeline_is_named(processes: Pool, kind: str) -> None:
    answers = processes.run(4, look, kind)
    for answer in answers:
        assert answer == answers[0], "every rank has the same result"
        assert answer["before"][0], answer["before"][2]
        assert not answer["with"][0]
        assert answer["with"][1] == 1
        for words in SAID[kind]:
            assert words in answer["with"][2], answer["with"][2]
        assert answer["after"][0], answer["after"][2]
