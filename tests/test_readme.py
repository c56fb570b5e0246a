"""Every python block of the README runs, in order and in one namespace; what it promises beside the code is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxchimera.cli import main
from fxchimera.schedule import Costs, lower, make_order, simulate
from fxchimera.view.text import gantt

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"README.md block {number}", "exec"), namespace)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_the_picture_is_what_the_view_draws(schedule):
    assert gantt(simulate(lower(make_order(schedule, 4, 4)), Costs.uniform(4, 1, 2))) in README


def test_the_table_of_steps_holds_closed_forms():
    """GPipe and 1F1B: (N + D - 1)(F + B); Chimera in K = N/D units: N(F + B) + (D/2 - 1)((F + B) + (2K - 1)(B - F))."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", README, re.MULTILINE)
    assert len(rows) == 5
    for stages, microbatches, *makespans in (map(int, row) for row in rows):
        straight = (microbatches + stages - 1) * 3
        chimera = microbatches * 3 + (stages // 2 - 1) * (3 + (2 * microbatches // stages - 1))
        assert makespans == [straight, straight, chimera]


def test_the_plan_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    blocks = re.findall(
        r"^```python\n(# gpt2.py\n.*?)^```\n\n```sh\nfxchimera (.*?)\n```\n\n```text\n(.*?)^```", README, re.M | re.S
    )
    ((builder, command, expected),) = blocks
    (tmp_path / "gpt2.py").write_text(builder)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out.startswith(expected)


def test_links_within_the_repository_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_commands_of_the_readme():
    assert "pip install nox && nox" in README
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-2:] == ["pip install nox", "nox"]
