"""What is loaded is data: 200 files made to harm, none of which runs anything, and no reader in the product that could."""

from __future__ import annotations

import ast
import contextlib
import os
import stat
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fxchimera
from fxchimera import FxChimeraError
from fxchimera.runtime.weights.weightfiles import open_weights
from tests.hostile import Trap, hostile_folders
from tests.parity import assert_same_tensors
from tests.saving import Saver

ROOT = Path(__file__).parents[2]
COUNT = 200
WIRES = {"fxchimera/runtime/processes/circle.py"}  # what ranks of one job tell each other, over connections of their own
COMPARED = {"passes/fxchimera_passes/capture/hostdraws.py"}  # dumps, and never loads


def test_the_traps_work(tmp_path: Path) -> None:
    """Else the test below would show nothing."""
    for number in range(5):
        mark = tmp_path / f"mark{number}"
        torch.save(Trap(mark, number), tmp_path / "trap.pt")
        torch.load(tmp_path / "trap.pt", weights_only=False)
        assert mark.exists(), number


def test_hostile_files_are_refused_and_run_nothing(tmp_path: Path) -> None:
    mark, good = tmp_path / "mark", tmp_path / "good"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Saver(2, layers=2)
    run.train(1)
    run.save(good)
    before = {key: value.clone() for key, value in run.pipe.state_dict().items()}
    accepted = []
    for place in hostile_folders(tmp_path / "cases", mark, good, COUNT):
        with contextlib.suppress(FxChimeraError):
            run.load(place)
            accepted.append(place.name)
        with contextlib.suppress(FxChimeraError):  # the weights of a forged index may be good ones
            source = open_weights(place)
            for name in source.names or ():
                source.read(name)
        assert not mark.exists(), f"{place} has run code"
    assert accepted == []
    assert_same_tensors(run.pipe.state_dict(), before)
    run.pipe.close()


@pytest.mark.torture
def test_a_model_that_begins_with_hostile_files_runs_nothing(tmp_path: Path) -> None:
    mark, good = tmp_path / "mark", tmp_path / "good"
    run = Saver(2, layers=2)
    run.save(good)
    run.pipe.close()
    for place in hostile_folders(tmp_path / "cases", mark, good, COUNT):
        with contextlib.suppress(FxChimeraError):
            begin(place)
        assert not mark.exists(), f"{place} has run code"


def begin(place: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fxchimera.pipeline(
        model,
        example_args=(torch.ones(4, 6),),
        loss_fn=torch.mean,
        num_stages=2,
        n_microbatches=2,
        schedule="1f1b",
        checkpoint=place,
    ).close()


def sources() -> list[tuple[str, ast.Module]]:
    found = [path for top in ("fxchimera", "passes") for path in sorted((ROOT / top).rglob("*.py"))]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in found}
    words = ("pickle", "marshal", "shelve", "dill", "yaml", "joblib", "eval(", "exec(", "load(")
    return [(name, ast.parse(text)) for name, text in texts.items() if any(word in text for word in words)]


def test_nothing_in_the_product_reads_a_file_as_code() -> None:
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                loaders = modules & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "joblib"}
                assert not loaders or name in WIRES | COMPARED, (name, loaders)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "pickle.load"), (name, node.lineno)
                if called == "torch.load":
                    assert any(key.arg == "weights_only" and ast.unparse(key.value) == "True" for key in node.keywords), name
                if called.endswith("load") and "numpy" in called:
                    assert not any(key.arg == "allow_pickle" for key in node.keywords), name


def test_what_a_run_writes_is_for_its_user(tmp_path: Path) -> None:
    """A checkpoint obeys the umask, the file beside its index too; reports and places are this user's whatever that is."""
    old = os.umask(0o077)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Saver(2, layers=2)
        run.save(tmp_path / "new" / "folder")
        run.pipe.close()
    finally:
        os.umask(old)
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_keys_that_are_numbers_come_back_as_numbers(tmp_path: Path) -> None:
    """MultiStepLR of torch looks its milestones up by number: as text they would never be met, without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Saver(2, layers=2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, milestones=[2, 10], gamma=0.5)
    extra = {"scheduler": scheduler.state_dict(), "odd": {True: [1, {None: "x"}], 2.5: {"fxchimera:items": 1}, (1, 2): 3}}
    run.pipe.save(tmp_path, extra=extra)
    found = run.pipe.load(tmp_path)
    assert found["odd"] == extra["odd"]
    assert found["scheduler"]["milestones"] == {2: 1, 10: 1}
    rates = []
    for state in (extra["scheduler"], found["scheduler"]):
        again = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), [2, 10], gamma=0.5)
        again.load_state_dict(state)
        for _ in range(3):
            again.optimizer.step()
            again.step()
        rates.append(again.optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5]
    with pytest.raises(FxChimeraError, match=r"but extra\['a'\]\[1\] is a Tensor"):
        run.pipe.save(tmp_path, extra={"a": [0, torch.ones(1)]})
    run.pipe.close()
