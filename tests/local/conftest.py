"""Every stage that a test of this folder runs is watched for tensors that reach a module by a hidden way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxchimera_passes.soundness import checked_reads


@pytest.fixture(autouse=True)
def watched_stages() -> Iterator[None]:
    """Fail a test in which a module reads another one's tensor that was not passed to it."""
    with checked_reads():
        yield
