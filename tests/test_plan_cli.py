"""``fxchimera plan`` as a user calls it: builders of all forms, the keys of the JSON object, caps, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxchimera
from fxchimera.cli import main

ROOT = Path(__file__).parents[1]

BUILDERS = """
import torch
from types import SimpleNamespace
from torch import nn

LAYERS = 8
def layers():
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(LAYERS)])

def batch(rows=16):
    return torch.randn(rows, 16)

def pair(): return layers(), (batch(),)
def tensor(): return layers(), batch()
def keywords(): return layers(), (), {"input": batch()}
def mapping(): return {"model": layers(), "kwargs": {"input": batch()}}
def record(): return SimpleNamespace(model=layers(), args=(batch(),), loss_fn=nn.functional.mse_loss)
def full(): return layers(), (batch(),), {}, nn.functional.mse_loss
def bare(): return layers()
def meta():
    with torch.device("meta"):
        return layers(), (batch(),)
class Holder:
    @staticmethod
    def build(): return pair()

def number(): return 3
def many(): return layers(), (), {}, None, None
def words(): return layers(), "x"
def fails(): raise ValueError("no data here")
value = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a file of builders, as the current one."""
    (tmp_path / "plan_builders.py").write_text(BUILDERS)
    (tmp_path / "plan_broken.py").write_text("import no_such_module_of_anybody\n")
    (tmp_path / "plan_raises.py").write_text("x = 1\nx.y\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    for name in ("plan_builders", "plan_broken", "plan_raises"):
        sys.modules.pop(name, None)


def plan(capsys, *arguments, status=0):
    assert main(["plan", *arguments]) == status
    printed = capsys.readouterr()
    return printed.out if status == 0 else printed.err


FORMS = ["pair", "tensor", "keywords", "mapping", "record", "full", "meta", "Holder.build"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_builder_gives_the_same_plan(here, capsys, form):
    """Eight equal layers of 16 x 16 on four stages; a micro-batch has 16 / 8 rows; AdamW keeps two numbers for each parameter."""
    found = json.loads(plan(capsys, f"plan_builders:{form}", "--json", "--schedule", "1f1b"))
    assert (found["num_stages"], found["num_ranks"], found["n_microbatches"], found["schedule"]) == (4, 4, 8, "1f1b")
    layer = 4 * (16 * 16 + 16)
    assert sum(stage["parameter_bytes"] for stage in found["stages"]) == 8 * layer
    for stage, memory in zip(found["stages"], found["memory"], strict=True):
        assert memory["parameters"] == memory["gradients"] == memory["optimizer"] / 2 == stage["parameter_bytes"]
        assert memory["mirrors"] == 0
        assert memory["in_flight"] == [{"pipe": 0, "stage": stage["stage"], "microbatches": 4 - stage["stage"]}]
        assert memory["activations"] == (4 - stage["stage"]) * stage["activation_bytes"]
        parts = ("parameters", "gradients", "optimizer", "mirrors", "activations", "messages")
        assert memory["total"] == sum(memory[part] for part in parts)
        assert memory["cap"] is None
        assert all(value["shape"] == [2, 16] and value["bytes"] == 2 * 16 * 4 for value in stage["sent"])
    assert found["certificate"]["lower_bound"] <= found["certificate"]["makespan"]
    assert set(found["report"]) == {"operations", "opened", "closed", "guards", "notes", "text"}
    assert found["report"]["operations"] == 8
    assert found["notes"] == []


def test_as_text_with_picture(here, capsys):
    text = plan(capsys, "plan_builders.py:pair", "--schedule", "chimera", "--svg", "step.svg", "--split-points", "2,4,6")
    for part in (
        "2 (down), 1 (up)",
        "0 .. 1",
        "of stage 3 (up)",
        "memory: a rank needs up to ",
        "weight copies",
        "recorded 8 operations",
    ):
        assert part in text
    assert (here / "step.svg").read_text().startswith("<svg")


def test_a_cap_is_kept_or_refused(here, capsys):
    """Two directions: a rank holds two stages, four times the bytes of one and twice those of the other, and activations."""
    layer = 4 * (16 * 16 + 16)
    options = ["plan_builders:pair", "--schedule", "chimera", "--json", "--memory"]
    found = json.loads(plan(capsys, *options, f"{15 * layer}"))
    assert max(need["total"] for need in found["memory"]) <= 15 * layer
    assert all(need["cap"] == 15 * layer for need in found["memory"])
    error = plan(capsys, *options, f"{11 * layer}", status=1)
    assert f"may have {11 * layer / 1024:.1f} KiB ({11 * layer} bytes)" in error
    assert "Use more stages" in error
    assert "1f1b" in error
    per_rank = json.loads(plan(capsys, *options, "1GiB,1GiB,1MB,1GiB"))
    assert [need["cap"] for need in per_rank["memory"]] == [2**30, 2**30, 10**6, 2**30]


def test_recomputation_by_hand(here, capsys):
    """A chain of linear layers keeps every layer's input; a stage that recomputes, what enters it or its parts."""
    options = ["plan_builders:pair", "--schedule", "1f1b", "--stages", "2", "--split-points", "4", "--json", "--recompute"]
    plain = json.loads(plan(capsys, *options, "none"))["stages"]
    mixed = json.loads(plan(capsys, *options, "none,full"))["stages"]
    assert [stage["recompute"] for stage in mixed] == ["none", "full"]
    assert mixed[0]["activation_bytes"] == plain[0]["activation_bytes"]
    assert mixed[1]["activation_bytes"] < plain[1]["activation_bytes"]
    extra = mixed[1]["backward_seconds"] - mixed[1]["recompute_seconds"]
    assert extra == pytest.approx(plain[1]["backward_seconds"])
    assert 'stage 1 recomputes "full"' in plan(capsys, *[o for o in options if o != "--json"], "full")
    assert "recompute must be" in plan(capsys, *options, "some", status=1)


def test_formulas(here, capsys):
    found = json.loads(plan(capsys, "plan_builders:pair", "--json", "--stages", "2", "--symbolic"))["formulas"]
    flops = [8 * 2 * 16 * 16, *(int(row["flops"].removesuffix("*batch")) for row in found)]
    assert flops[0] == sum(flops[1:])
    text = plan(capsys, "plan_builders:pair", "--schedule", "1f1b", "--symbolic")
    assert text.count(": flops ") == 4


def test_inputs_from_the_command_line(here, capsys):
    found = json.loads(plan(capsys, "plan_builders:bare", "--json", "--input", "input=float32[8, 16]"))
    assert found["stages"][0]["sent"][0]["shape"] == [1, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan_builders"], "is written my_pkg.my_mod:build"),
        (["no_such_package.mod:build"], "there is no module 'no_such_package'"),
        (["nowhere.py:build"], "there is no file nowhere.py"),
        (["plan_broken:build"], "plan_broken needs the module 'no_such_module_of_anybody'"),
        (["plan_raises:build"], "AttributeError: 'int' object has no attribute 'y'"),
        (["plan_builders:nothing"], "has no 'nothing'; it has Holder, "),
        (["plan_builders:value"], "cannot be called"),
        (["plan_builders:number"], "returned int; it must return"),
        (["plan_builders:many"], "it must return"),
        (["plan_builders:words"], "args of type str"),
        (["plan_builders:fails"], "ValueError: no data here (at "),
        (["plan_builders:bare"], "without a batch"),
        (["plan_builders:bare", "--input", "int12[3]"], "an input is written"),
        (["plan_builders:pair", "--schedule", "chimera", "--stages", "3"], "even number of stages"),
        (["plan_builders:pair", "--microbatches", "32"], "16 rows cannot be divided into n_microbatches=32"),
        (["plan_builders:pair", "--stages", "0"], "num_stages must be at least 1"),
        (["plan_builders:pair", "--memory", "much"], "memory must be a size"),
        (["plan_builders:pair", "--memory", "1GiB,2GiB"], "2 sizes for 4 ranks"),
        (["plan_builders:pair", "--schedule", "nope"], "nope"),
        (["plan_builders:pair", "--split-points", "9"], "split point '9'"),
        (["plan_builders:meta", "--cost", "measured"], "needs weights"),
        (["plan_builders:pair", "--svg", "no/such/folder.svg"], "cannot be written"),
        (["plan_builders:pair", "--symbolic", "sequence"], "formulas in the sequence|no polynomial|cannot be recorded"),
    ],
)
def test_mistakes(here, capsys, arguments, message):
    """One line on the standard error, no traceback."""
    import re

    error = plan(capsys, *arguments, status=1)
    assert error.startswith("fxchimera: ")
    assert re.search(message if "|" in message else re.escape(message), error), error


def test_as_a_command(here):
    """``python -m fxchimera plan`` finds a module of the current directory."""
    command = [sys.executable, "-m", "fxchimera", "plan", "plan_builders:pair", "--json", "--stages", "2", "--microbatches", "4"]
    environment = {"PYTHONPATH": f"{ROOT / 'passes'}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["n_microbatches"] == 4


def test_the_one_line_keeps_the_cap_too():
    layers = [torch.nn.Linear(16, 16) for _ in range(8)]
    options = {"example_args": (torch.randn(8, 16),), "num_stages": 2, "n_microbatches": 4, "schedule": "1f1b"}
    with fxchimera.pipeline(torch.nn.Sequential(*layers), memory="20 KiB", **options) as pipe:
        assert max(need.total for need in pipe.plan.memory) <= 20 * 1024
        assert pipe.plan.caps == (20 * 1024,) * 2
        assert ", and may have 20.0 KiB" in str(pipe.plan)
        assert pipe.plan._repr_html_().count("<table>") == 2
    with pytest.raises(fxchimera.PartitionError, match=r"rank . needs .* and may have 10.0 KiB"):
        fxchimera.pipeline(torch.nn.Sequential(*layers), memory=10 * 1024, **options)


def test_the_search_plans_cut_and_order(here, capsys):
    """Three ranks, which chimera refuses; inputs so long that two copies exchange little, then a cap below two copies."""
    options = ["plan_builders:meta", "--json", "--stages", "3", "--microbatches", "4"]
    rows = ["--input", "input=float32[1024, 16]"]
    found = json.loads(plan(capsys, *options, *rows, "--svg", "step.svg"))
    assert (found["schedule"], found["num_ranks"], found["certificate"]["schedule"]) == ("auto", 3, "auto")
    assert found["certificate"]["lower_bound"] <= found["certificate"]["makespan"]
    assert found["certificate"]["weight_copies"] == 2
    assert all(len(stage["ranks"]) == 2 for stage in found["stages"])
    assert (here / "step.svg").read_text().startswith("<svg")
    layer = 4 * (16 * 16 + 16)
    small = json.loads(plan(capsys, *options, "--memory", f"{14 * layer}"))
    assert small["certificate"]["weight_copies"] == 1
    assert max(need["total"] for need in small["memory"]) <= 14 * layer
    text = plan(capsys, *rows, *[option for option in options if option != "--json"])
    assert "schedule auto" in text
    assert "2 weight copies" in text
