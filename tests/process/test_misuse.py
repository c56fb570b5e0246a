"""Ranks that do not do the same are told so, all of them, before data is used; no process dies of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests import misuse
from tests.misuse import MISUSE, OF_BATCHES, OF_MODELS, WAIT_SECONDS
from tests.process.pool import Pool


def some(kinds: Iterable[str], default: str) -> list[Any]:
    """All kinds, of which one runs by default."""
    return [pytest.param(kind, marks=() if kind == default else pytest.mark.torture) for kind in kinds]


@pytest.mark.parametrize("kind", some(OF_MODELS, "schedule"))
def test_plans_that_differ_are_refused_with_the_difference(processes: Pool, kind: str) -> None:
    answers = processes.run(2, misuse.differ_at_wrap, kind, spoils=True)
    (text,) = {text for _, text, _ in answers}
    assert {error for error, _, _ in answers} == {"FxChimeraError"}
    assert text.startswith("ranks [1] made another plan than rank 0")
    seen = {"schedule": "gpipe", "n_microbatches": "2 micro-batches", "nan": "skip", "batch_norm": "deferred"}.get(
        kind, "rank 1 has"
    )
    assert seen in text.partition("The first difference")[2], text


@pytest.mark.parametrize("kind", some(OF_BATCHES, "rows"))
def test_a_value_that_is_not_as_recorded_is_not_sent(processes: Pool, kind: str) -> None:
    for error, text, seconds in processes.run(2, misuse.differ_in_a_microbatch, kind, spoils=True):
        assert error == "PipelineError"
        assert text.startswith("rank 0 failed: stage 0 (down), micro-batch 2, action 0SEND_F2: PipelineError: ") or (
            kind == "dimensions" and text.startswith("rank 0 failed: stage 0 (down), micro-batch 2, action ")
        ), text
        assert "but the recording" in text
        assert seconds < 8.0


@pytest.mark.torture
def test_a_missing_call_is_missed_by_name(processes: Pool) -> None:
    for error, text, seconds in processes.run(2, misuse.calls, "missing", spoils=True):
        assert error == "PipelineError"
        assert text.startswith(
            "rank 1 failed: rank 0, in an exchange among all ranks, has waited 3 s for it; it is at: outside of a step"
        )
        assert seconds < 8.0 * WAIT_SECONDS


@pytest.mark.torture
@pytest.mark.parametrize("name", MISUSE)
def test_every_misuse_is_an_error_of_ours_on_every_rank(processes: Pool, name: str) -> None:
    function, arguments = MISUSE[name]
    for error, text, _ in processes.run(2, function, *arguments, spoils=True):
        assert error.endswith("Error"), text
        assert error in ("FxChimeraError", "BatchError", "PipelineError", "CaptureError"), f"{error}: {text}"
