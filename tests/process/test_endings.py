"""Ctrl-C, SIGTERM and the death of the launcher end all ranks soon, in few words, and leave nothing; nobody else would end them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxchimera.runtime.failures.fate import Fate, Identity
from tests.ending import KINDS, end

pytestmark = pytest.mark.skipif(Identity.own().fate() is Fate.UNKNOWN, reason="the system has no /proc")

_SECONDS, _SLACK = 5.0, 6.0  # the bar, of an idle machine; on a busy one a process of torch's takes seconds to leave
_LINES = 30  # of all ranks, those of torchrun not counted
_TRIALS = 5
_DEFAULT = {("killed", 2, 0)}


def cells() -> list[Any]:
    """Every kind, several times with two ranks and once with four."""
    found = []
    for kind in KINDS:
        for ranks, seed in (*((2, seed) for seed in range(_TRIALS)), (4, _TRIALS)):
            marks = () if (kind, ranks, seed) in _DEFAULT else pytest.mark.torture
            found.append(pytest.param(kind, ranks, seed, marks=marks))
    return found


def left(files: tuple[str, ...]) -> list[str]:
    """The files of ours that a failed call does not announce; torch has a folder of its own, and reports are to stay."""
    return [name for name in files if name.startswith("fxchimera") and not name.startswith("fxchimera-rank")]


@pytest.mark.parametrize(("kind", "ranks", "seed"), cells())
def test_ranks_end_with_their_launcher(kind: str, ranks: int, seed: int, tmp_path: Path) -> None:
    found = end(kind, ranks, tmp_path, seed)
    assert found.seconds < _SLACK * _SECONDS
    assert found.orphans == ()
    assert left(found.files) == []
    assert len(found.lines) <= _LINES * max(1, ranks // 2), "\n".join(found.lines)
    if kind == "killed":
        assert sum(" is gone" in line and "its launcher, torchrun (process " in line for line in found.lines) == ranks
    else:
        assert sum(line.endswith(" KeyboardInterrupt") for line in found.lines) == (ranks if kind.startswith("ctrl-c") else 0)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("ctrl-c", 0), *(pytest.param(k, s, marks=pytest.mark.torture) for k in KINDS for s in range(1, 1 + _TRIALS))],
)
def test_ranks_that_are_threads_end_with_their_process(kind: str, seed: int, tmp_path: Path) -> None:
    found = end(kind, 4, tmp_path, seed, threads=True)
    assert found.seconds < _SLACK * _SECONDS
    assert (found.orphans, left(found.files)) == ((), [])
    assert found.code == -KINDS[kind][0], "the exit code of a script that is interrupted"
    assert len(found.lines) <= _LINES
    if kind.startswith("ctrl-c"):
        assert found.lines[-1] == "KeyboardInterrupt"
