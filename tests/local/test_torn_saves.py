"""A save that is killed anywhere, and a file that is damaged anywhere: one whole save is loaded to the last bit, or nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.killing import can_trace
from tests.torn import Torn, damages

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork", "ignore:batch norm in")


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torn]:
    made = Torn(tmp_path_factory.mktemp("torn"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def calls(torn: Torn) -> int:
    if not can_trace():
        pytest.skip("this system does not let a process trace its child")
    count = torn.calls()
    assert count > 20, "a save opens, writes, flushes, renames"
    return count


def assert_whole(answers: list[str]) -> None:
    assert set(answers) <= {"first", "second"}, Counter(answers)


def test_a_save_killed_before_a_system_call(torn: Torn, calls: int) -> None:
    """Every few of them; the first leaves the earlier save, the last the new one."""
    answers = torn.at_calls([0, *range(3, calls - 1, max(calls // 16, 1)), calls - 1])
    assert_whole(answers)
    assert (answers[0], answers[-1]) == ("first", "second")
    assert answers == sorted(answers), "there is one moment before which it is the first save, and after which the second"


def test_a_save_killed_at_some_time(torn: Torn) -> None:
    assert_whole(torn.at_times(0.002 * number for number in range(6)))


def test_one_bit_or_a_missing_end_is_refused_before_anything_changes(torn: Torn) -> None:
    assert torn.accepted(damages(torn.second_folder, flips=40, cuts=16)) == []


@pytest.mark.torture
@pytest.mark.timeout(3000)
def test_a_save_killed_anywhere(torn: Torn, calls: int) -> None:
    """Before every system call, and at random times, a thousand in all."""
    answers = torn.at_calls(range(calls))
    assert_whole(answers)
    chosen = random.Random(1)
    later = torn.at_times(chosen.uniform(0.0, 0.06) for _ in range(1000 - calls))
    assert_whole(later)
    assert {"first", "second"} == set(answers)


@pytest.mark.torture
@pytest.mark.timeout(3000)
def test_damage_anywhere(torn: Torn) -> None:
    assert torn.accepted(damages(torn.second_folder, flips=2000, cuts=500, seed=1)) == []
