"""Our stages and orders under torch's runtime, and under ours: losses and every gradient of several steps are the plain model's."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import interop_ranks
from tests.interop_ranks import RATE, STEPS, Run, example_of
from tests.parity import TOLERANCE, Outcome, assert_close, full_batch
from tests.process.alike import union
from tests.process.pool import Pool

pytestmark = pytest.mark.process

LOOPS = Path(__file__).parents[2] / "tutorials" / "loops"

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

# model, ranks, micro-batches, our order, and torch's class (None: torch's runtime runs our order)
CELLS = [
    ("skip", 3, 3, "1f1b", "Schedule1F1B"),
    ("bert", 2, 4, "1f1b", "Schedule1F1B"),  # a mask and labels that later stages read themselves; the model's own loss
    ("nn_transformer", 2, 4, "zbv", None),  # values that only pass through, and gradients that are not contiguous
]
MORE = [
    ("skip", 4, 4, "gpipe", "ScheduleGPipe"),
    ("mlp", 4, 8, "1f1b", "Schedule1F1B"),
    ("masked_rotary", 2, 4, "interleaved-1f1b", "ScheduleInterleaved1F1B"),
    ("mlp", 2, 4, "zbv", "ScheduleZBVZeroBubble"),
    ("mlp", 2, 4, "interleaved-1f1b", "ScheduleLoopedBFS"),
    ("mlp", 4, 5, "1f1b", None),
    ("mlp", 2, 4, "interleaved-1f1b", None),
    ("mlp", 3, 6, "zb-h1", None),
]


def plain(name: str, n: int) -> list[Any]:
    """Loss and gradients of each step of the plain model on the whole batch."""
    example = example_of(name, n)
    optimizer = torch.optim.SGD(example.model.parameters(), RATE)
    found = []
    for _ in range(STEPS):
        found.append(full_batch(example))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("name", "stages", "n", "ours", "theirs"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.matrix) for cell in MORE)]
)
def test_both_runtimes_train_as_the_plain_model(
    processes: Pool, name: str, stages: int, n: int, ours: str, theirs: str | None
) -> None:
    if theirs is None and not hasattr(schedules, "_PipelineScheduleRuntime"):
        pytest.skip(f"torch {torch.__version__} has no _PipelineScheduleRuntime")
    answers = processes.run(stages, interop_ranks.train_both, name, stages, n, ours, theirs)
    for number, expected in enumerate(plain(name, n)):
        for whose in (0, 1):
            runs: list[Run] = [answer[whose] for answer in answers]
            losses = [run["losses"][number] for run in runs if run["losses"][number] is not None]
            assert losses
            gradients = union([run["gradients"][number] for run in runs])
            for loss in losses:
                assert_close(Outcome(loss, gradients), expected, TOLERANCE[torch.float64])


@pytest.mark.matrix
def test_a_pipe_of_torchs_trains_alike_under_both_runtimes(processes: Pool) -> None:
    """Losses and gradients of two steps; a value of the first stage goes to the last."""
    answers = processes.run(2, interop_ranks.train_pipe_both, 2, limit=120.0)
    for number in range(STEPS):
        ours, theirs = ([answer[whose] for answer in answers] for whose in (0, 1))
        loss = next(run["losses"][number] for run in theirs if run["losses"][number] is not None)
        expected = Outcome(loss, union([run["gradients"][number] for run in theirs]))
        found = union([run["gradients"][number] for run in ours])
        for run in ours:
            assert_close(Outcome(run["losses"][number], found), expected, TOLERANCE[torch.float64])


def test_the_tutorial_trains_as_the_plain_model(processes: Pool) -> None:
    answers = processes.run(2, interop_ranks.run_script, str(LOOPS))
    script = runpy.run_path(str(LOOPS / "torch_schedules.py"))
    model, losses = script["make_model"](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens in script["make_batches"](4):
        optimizer.zero_grad()
        loss = script["token_loss"](model(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name in ("torch 1F1B", "our zb-h1"):
        assert answers[0][name] == []
        assert answers[1][name] == pytest.approx(losses, rel=1e-5)
