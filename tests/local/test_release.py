"""What ends waits that look nowhere is called once when something fails, and at once if it comes too late for that."""

from __future__ import annotations

from fxchimera.runtime.failures.failure import Cause, Failure, Limits


def test_released_once_by_the_first_cause() -> None:
    failure, calls = Failure(Limits(1.0)), list[str]()
    failure.when_failed(lambda: calls.append(str(failure.cause)))
    failure.report(Cause(1, "first"))
    failure.report(Cause(2, "second"))
    assert calls == [str(Cause(1, "first"))], "the cause is known by then, for whoever is released"
    failure.when_failed(lambda: calls.append("late"))
    assert calls[1:] == ["late"]
