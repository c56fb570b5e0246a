"""What a failed call leaves behind for those who look for the reason."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
import torch.nn.functional as F

import fxchimera
from tests.local.toys import chain, data, seeded
from tests.local.wrapped import step, wrap
from tests.models import Example


def failing() -> tuple[Example, list[int]]:
    """An example whose last layer divides by the number in the list."""
    x, target = data(8, 6)
    model, divisor = seeded(lambda: chain(4)), [1]
    model[3].register_forward_hook(lambda module, args, output: output / (1 // divisor[0]))
    return Example(model, (x,), {}, target, F.mse_loss), divisor


def test_a_report_tells_the_last_actions_and_where_the_threads_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXCHIMERA_REPORTS", str(tmp_path))
    example, divisor = failing()
    with wrap(example, 2, 4, "1f1b") as pipe:
        step(pipe, example)
        assert list(tmp_path.iterdir()) == []
        divisor[0] = 0
        with pytest.raises(fxchimera.PipelineError, match="by zero") as caught:
            step(pipe, example)
    (path,) = tmp_path.iterdir()
    assert caught.value.__notes__ == [f"What this process did last: {path}"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert str(caught.value) in text
    assert re.search(r"rank 0, its last actions.*\n(.* 0F\d\n|.* 0B\d\n|.* 0SEND_F\d\n)+", text)
    assert re.search(r"rank 1, .*\n(.*\n)*.* 1B3\n", text), "the step before this one counts, too"
    assert "MainThread:" in text
    assert "test_report.py" in text


def test_without_a_place_for_it_the_error_stays_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXCHIMERA_REPORTS", str(tmp_path / "missing"))
    example, divisor = failing()
    with wrap(example, 1, 1, "gpipe") as pipe:
        divisor[0] = 0
        with pytest.raises(fxchimera.PipelineError, match="by zero") as caught:
            step(pipe, example)
    assert not hasattr(caught.value, "__notes__")
