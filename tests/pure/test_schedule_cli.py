"""``fxchimera simulate`` and ``fxchimera compare`` as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxchimera.cli import main
from fxchimera.schedule import make_order

ROOT = Path(__file__).parents[2]
COSTS = ["--forward", "1", "--input-grad", "1.2", "--weight-grad", "0.8", "--latency", "0.1"]


def run(capsys, *arguments):
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_auto_as_json(capsys, tmp_path):
    """The fields that are promised, the figures asked for, and the files."""
    files = ["--svg", str(tmp_path / "a.svg"), "--csv", str(tmp_path / "a.csv")]
    size = ["--stages", "8", "--microbatches", "16", "--peak", "8"]
    found = json.loads(run(capsys, "simulate", "--schedule", "auto", *size, *COSTS, "--shape", "bidirectional", "--json", *files))
    assert found["bubble"] <= 5.0
    assert found["makespan"] == pytest.approx(48 + found["bubble"])
    assert found["ideal"] == pytest.approx(48)
    assert found["lower_bound"] == pytest.approx(52.6)
    assert found["gap"] == pytest.approx(found["makespan"] / 52.6 - 1)
    assert (found["schedule"], found["shape"]) == ("auto", "bidirectional")
    assert (found["peak_activations"], found["weight_copies"]) == (8, 2)
    assert found["span_bubble"] <= found["bubble"]
    assert found["compile_seconds"] > 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    again = json.loads(run(capsys, "simulate", "--schedule", str(tmp_path / "a.csv"), *size, *COSTS, "--json"))
    assert {**again, "schedule": "auto"} == {
        key: value for key, value in found.items() if key in again and key not in ("compile_seconds",)
    } | {"compile_seconds": again["compile_seconds"]}


def test_lists_of_costs_and_chunks(capsys):
    """One value a stage; a V takes half of a stage in each chunk: F and B add up to the model's whichever way it is cut."""
    sizes = ["--stages", "4", "--microbatches", "8", "--forward", "1,2,3,4", "--input-grad", "1,1,1,1", "--weight-grad", "2"]
    ideals = {
        name: json.loads(run(capsys, "simulate", "--schedule", name, *sizes, "--json"))["ideal"]
        for name in ("1f1b", "zbv", "dualpipe", "interleaved-1f1b")
    }
    assert ideals == dict.fromkeys(ideals, pytest.approx((10 + 12) * 8 / 4))


def test_price_of_splitting(capsys):
    """ZB-H1 splits all: at 10 % its makespan grows by 10 % of the backwards and more; 1F1B's does not."""
    sizes = ["--stages", "4", "--microbatches", "8", "--json"]
    for name, least in (("1f1b", 0.0), ("zb-h1", 0.1 * 2 * 8)):
        free, priced = (
            json.loads(run(capsys, "simulate", "--schedule", name, *sizes, "--split-cost", price))["makespan"]
            for price in ("0", "0.1")
        )
        assert priced - free >= least - 1e-9
        assert (priced == free) == (least == 0.0)


def test_compare(capsys):
    text = run(capsys, "compare", "--stages", "4", "--microbatches", "8", "--seconds", "0.1", "--peak", "4", *COSTS)
    rows = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert set(rows) >= {"gpipe", "1f1b", "chimera", "zbv", "dualpipe", "auto"}
    assert "8*" in rows["gpipe"]
    table = json.loads(run(capsys, "compare", "--stages", "4", "--microbatches", "8", "--seconds", "0.1", "--json", *COSTS))[
        "schedules"
    ]
    assert [row["makespan"] for row in table] == sorted(row["makespan"] for row in table)
    assert table[0]["schedule"] == "auto"
    assert all(row["lower_bound"] <= row["makespan"] for row in table)


def test_exchange_is_beside_the_computations(capsys):
    """D=2: no bubble; a mirror's gradients leave after its last backward, so their seconds end the step."""
    arguments = ["simulate", "--schedule", "chimera", "--stages", "2", "--microbatches", "4", "--exchange", "0.5", "--json"]
    found = json.loads(run(capsys, *arguments))
    assert found["step_with_exchange"] == pytest.approx(found["makespan"] + 2 * 0.5)  # parameters before, gradients after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zigzag"], "'zigzag' is neither a schedule (gpipe, 1f1b, chimera"),
        (["--forward", "1,2"], "--forward has 2 numbers; give one, or one for each of the 4 stages"),
        (["--schedule", "chimera", "--stages", "3"], "chimera needs an even number of stages"),
        (["--peak", "0.5"], "one micro-batch alone needs 1 there"),
        (["--split-cost", "-1"], "share of at least 0, got -1"),
        (["--stages", "0"], "--stages must be at least 1, got 0"),
        (["--stages", "0", "--schedule", "gpipe"], "num_stages must be at least 1, got 0"),
        (["--microbatches", "0"], "n_microbatches must be at least 1, got 0"),
        (["--seconds", "nan"], "seconds must be finite and not negative, got nan"),
        (["--peak", "nan"], "peak must be a number"),
        (["--exchange", "-1", "--schedule", "chimera"], "--exchange must be finite and not negative, got -1"),
        (["--svg", "/nowhere/a.svg", "--schedule", "gpipe"], "cannot write /nowhere/a.svg: No such file or directory"),
        (["--csv", "/nowhere/a.csv", "--schedule", "gpipe"], "cannot write /nowhere/a.csv: No such file or directory"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert main(["simulate", "--stages", "4", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_wrong_files(capsys, tmp_path):
    path = tmp_path / "order.csv"
    lines = make_order("1f1b", 2, 2).to_csv().splitlines()
    path.write_bytes(b"\xff\xfe")
    assert main(["simulate", "--schedule", str(path), "--stages", "2"]) == 1
    assert "cannot read" in capsys.readouterr().err
    for text, message in (
        ("", "holds no actions"),
        ("0B0\n", "holds no forward"),
        ("\n".join([lines[0], lines[0], lines[1]]), "0F0 is there twice, on rank 0 and on rank 1"),
        (lines[0] + "\n" + lines[1].replace("1F1,", ""), "1F1 is missing"),
        ("0F0,0B0,0B1,0F1\n" + lines[1], "cannot proceed"),
        ("0F0,zero\n", "'zero' is not an action"),
    ):
        path.write_text(text)
        assert main(["simulate", "--schedule", str(path), "--stages", "2"]) == 1
        assert message in capsys.readouterr().err


def test_no_torch():
    """The verbs work, and start quickly, without importing torch."""
    program = "import sys; from fxchimera.cli import main; main(['simulate', '--schedule', 'zbv']); print('torch' in sys.modules)"
    path = os.pathsep.join((str(ROOT), str(ROOT / "passes")))
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
