"""One rank is killed, stopped or late in the middle of a step: the others name it, soon, or wait for it."""

from __future__ import annotations

import re

import pytest

from tests.process import failing
from tests.process.pool import Pool

KILLED_SECONDS, STOPPED_SECONDS, CLOSE_SECONDS = 3.0, 10.0, 15.0  # the bars, of an idle machine
SLACK = 3.0  # times as long on a busy one


# the second forward of each rank, by the pictures of the schedules
@pytest.mark.parametrize(
    ("stages", "schedule", "victim", "way", "where"),
    [
        (2, "1f1b", 1, "kill", "stage 1 (down), micro-batch 1, action 1F1"),
        (4, "chimera", 2, "kill", "stage 2 (down), micro-batch 0, action 2F0"),
        (4, "1f1b", 3, "leave", "stage 3 (down), micro-batch 1, action 3F1"),
        (4, "1f1b", 0, "kill", ""),
        (4, "chimera", 1, "stop", "stage 2 (up), micro-batch 2, action 2F2"),
        (2, "1f1b", 0, "stop", ""),
    ],
)
def test_the_survivors_name_the_rank_that_is_lost(
    processes: Pool, stages: int, schedule: str, victim: int, way: str, where: str
) -> None:
    answers = processes.survivors(stages, victim, failing.meet, stages, schedule, victim, way, 2)
    for rank, (error, text, seconds, closing) in answers.items():
        assert error == "PipelineError", rank
        assert text.startswith(f"rank {victim} failed: "), f"rank {rank}: {text}"
        assert re.search(rf"(is gone|has been stopped).*{re.escape(where)}", text), text
        assert seconds < SLACK * (STOPPED_SECONDS if way == "stop" else KILLED_SECONDS)
        assert closing < SLACK * CLOSE_SECONDS


@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (4, "chimera")])
def test_a_slow_rank_is_waited_for(processes: Pool, stages: int, schedule: str) -> None:
    for error, text, seconds, _ in processes.run(stages, failing.meet, stages, schedule, 1, "late", 1):
        assert (error, text) == ("", "")
        assert seconds > 3.0
