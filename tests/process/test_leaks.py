"""Pipelines of processes that are made and closed leave no threads, no open files and no memory behind."""

from __future__ import annotations

import os

import pytest

from tests.cycles import cycles, late_threads
from tests.process.pool import Pool

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the system has no /proc")


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.torture)])
def test_nothing_is_left(processes: Pool, count: int) -> None:
    for left in processes.run(2, cycles, count, 2, "chimera", limit=60.0 + 6 * count):
        assert (left.threads, left.files) == ((), ())
        assert left.resident < 5e6


def test_threads_that_first_run_when_the_pipeline_is_closed_end(processes: Pool) -> None:
    assert processes.run(2, late_threads, 4.0) == [(), ()]
