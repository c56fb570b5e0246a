"""A fault on one rank, in the middle of a step, is every rank's error, soon, by the same name; a slow rank is waited for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.faults import HARMLESS, LATE_SECONDS, Fault, faults
from tests.process import failing
from tests.process.culprits import SAID, assert_all_name_the_culprit
from tests.process.pool import Pool

DEFAULT = {  # these of the matrix run by default: every kind once
    ("forward", 4, 0), ("backward", 2, 2), ("loss", 4, 1), ("stop iteration", 2, 1), ("memory", 4, 4), ("interrupted", 2, 5),
    ("exit", 4, 3), ("kill", 4, 1), ("kill", 2, 0), ("leave", 4, 2), ("stop", 4, 4), ("stop", 2, 0),
    ("device memory", 2, 3), ("extra call", 4, 5),
}  # fmt: skip


def cells() -> list[Any]:
    """Every kind, six places each, two and four ranks."""
    found = []
    for kind in SAID:
        for stages in (2, 4):
            for place, fault in enumerate(faults(kind, stages)):
                marks = () if (kind, stages, place) in DEFAULT else pytest.mark.torture
                schedule = "chimera" if place % 2 else "1f1b"
                found.append(pytest.param(fault, stages, schedule, marks=marks, id=f"{kind}-{stages}-{place}"))
    return found


@pytest.mark.parametrize(("fault", "stages", "schedule"), cells())
def test_every_survivor_names_the_culprit(processes: Pool, fault: Fault, stages: int, schedule: str) -> None:
    assert_all_name_the_culprit(processes, fault, stages, schedule, failing.meet)


@pytest.mark.parametrize(("kind", "stages", "schedule"), [("late", 4, "chimera"), ("busy", 2, "1f1b")])
def test_a_slow_rank_is_waited_for(processes: Pool, kind: str, stages: int, schedule: str) -> None:
    """One that keeps the interpreter to itself gives no sign of life, and is alive all the same."""
    assert kind in HARMLESS
    for error, text, seconds, again, _, _ in processes.run(stages, failing.meet, Fault(kind, 1, 2), stages, schedule):
        assert (error, text, again) == ("", "", "")
        assert seconds > LATE_SECONDS


@pytest.mark.parametrize(
    ("stages", "schedule", "count", "seconds", "scale"),
    [
        (2, "chimera", 10, 0.3, 0.05),
        pytest.param(4, "chimera", 100, 0.3, 0.05, marks=pytest.mark.torture),
        pytest.param(2, "1f1b", 10, 30.0, 1.0, marks=[pytest.mark.torture, pytest.mark.timeout(600)]),
    ],
)
def test_stragglers_raise_no_false_alarm_and_change_no_bit(
    processes: Pool, stages: int, schedule: str, count: int, seconds: float, scale: float
) -> None:
    answers = processes.run(
        stages, failing.straggle, stages, schedule, count, seconds, scale, limit=60.0 + 2 * count * seconds, spoils=True
    )
    assert len({loss for losses in answers for loss in losses}) == 1
    assert [len(losses) for losses in answers] == [count + 1] * stages


@pytest.mark.parametrize(
    ("stages", "slow", "schedule"),
    [
        (4, 2, "1f1b"),
        *(pytest.param(*one, marks=pytest.mark.torture) for one in ((2, 0, "chimera"), (4, 0, "gpipe"), (4, 3, "zb-h1"))),
    ],
)
def test_who_waits_long_says_for_whom(processes: Pool, stages: int, slow: int, schedule: str) -> None:
    answers = processes.run(stages, failing.told, stages, schedule, slow, 1.5)
    assert len({loss for _, losses in answers for loss in losses}) == 1
    places = rf"stage {slow} \((down|up)\), micro-batch \d, action {slow}F\d", "outside of a step"
    for rank, ((first, second, third, fourth), _) in enumerate(answers):
        assert (first, fourth) == ([], []), "a first step may compile"
        for messages, place in zip((second, third), places, strict=True):
            assert bool(messages) == (rank != slow), messages
            who = rf"WARNING: rank {rank}, .* has waited \d s for (rank \d, which waits for )?rank {slow}"
            for message in messages:
                assert re.match(rf"{who}, which is at: {place}; it waits on", message), message
