"""The processes that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.pool import Pool


@pytest.fixture(scope="session")
def processes() -> Iterator[Pool]:
    """Four processes, started at the first use and once per xdist worker."""
    pool = Pool(4)
    yield pool
    pool.stop()
