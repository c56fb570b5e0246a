"""What a failed call shows: the user's line that made it, and of the user's own exception everything."""

from __future__ import annotations

import signal
import threading
import traceback

import pytest

from fxchimera import PipelineError
from tests.faults import Fault, in_thread_of, plant
from tests.local.wrapped import step, wrap


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def failed(monkeypatch: pytest.MonkeyPatch, full: bool) -> BaseException:
    if full:
        monkeypatch.setenv("FXCHIMERA_TRACEBACKS", "full")
    else:
        monkeypatch.delenv("FXCHIMERA_TRACEBACKS", raising=False)
    example, arm = plant(Fault("forward", 1, 1), in_thread_of(1))
    with wrap(example, 2, 4) as pipe:
        arm()
        with pytest.raises(PipelineError) as caught:
            step(pipe, example)
    return caught.value


def test_frames_of_ours_are_left_out_and_those_of_the_user_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    error = failed(monkeypatch, full=False)
    assert names(error) == ["failed", "step", "step"]
    assert error.__cause__ is not None
    assert names(error.__cause__)[-2:] == ["before", "_strike"]


def test_all_frames_are_there_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(names(failed(monkeypatch, full=True))) > 5


def test_an_interruption_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXCHIMERA_TRACEBACKS", raising=False)
    example, arm = plant(Fault("nap", 1, 1), in_thread_of(1), 1.0)
    with wrap(example, 2, 4) as pipe:
        arm()
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt) as caught:
            step(pipe, example)
        assert names(caught.value) == ["test_an_interruption_stays_what_it_is", "step", "step"]
        with pytest.raises(PipelineError, match="the caller was interrupted: KeyboardInterrupt"):
            step(pipe, example)
