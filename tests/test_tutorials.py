"""Every tutorial runs from top to bottom, and its notebook holds the same cells as its script."""

from __future__ import annotations

import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def script(request):
    return request.param


def test_the_notebook_has_the_cells_of_the_script(script):
    """``jupytext --to ipynb`` makes the notebook; run it again after a change of the script."""
    ours = jupytext.read(script)
    twin = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert [(cell.cell_type, cell.source) for cell in ours.cells] == [(cell.cell_type, cell.source) for cell in twin.cells]


@pytest.mark.timeout(240)
def test_it_runs(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "passes")]))
    notebook = jupytext.read(script)
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_there_is_a_first_tutorial():
    assert SCRIPTS
    assert SCRIPTS[0].stem == "01_first_pipeline"
