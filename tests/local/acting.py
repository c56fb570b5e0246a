"""Look at, or hold up, every action that the ranks of this process do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fxchimera.runtime.steps import executor
from fxchimera.schedule.action import Action

__all__ = ["around_actions"]


def around_actions(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[int, Action], None] = lambda rank, action: None,
    after: Callable[[int, Action], None] = lambda rank, action: None,
) -> None:
    """Call ``before`` and ``after`` around each computation and each send of every rank, on the rank's own thread."""
    act = executor._Run.act

    def surrounded(run: Any, cue: Any) -> None:
        before(run._rank, cue.action)
        act(run, cue)
        after(run._rank, cue.action)

    monkeypatch.setattr(executor._Run, "act", surrounded)
