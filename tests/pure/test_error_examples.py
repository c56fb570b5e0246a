"""Examples of tutorials/errors.md that need no model: orders of one's own, costs, and what to plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fxchimera import ScheduleError
from fxchimera.cli import main
from fxchimera.schedule import (
    Action,
    Costs,
    Limits,
    Problem,
    auto,
    certify,
    check,
    counterpart,
    interleaved,
    lower,
    make_order,
    mirrored_pairs,
    one_way,
    read_csv,
    simulate,
)
from fxchimera.schedule.fleet import simulate_fleet


def test_an_order_that_forgets_a_backward() -> None:
    order = read_csv("0F0,0B0\n1RECV_F0,1F0\n", one_way(num_stages=2, n_microbatches=1))
    with pytest.raises(ScheduleError, match="rank 1 runs 1F0 and must run 1B0, or 1I0 and 1W0; it runs none of them"):
        check(order)


def test_an_order_that_runs_a_backward_before_its_forward() -> None:
    order = read_csv("0B0,0F0\n", one_way(num_stages=1, n_microbatches=1))
    with pytest.raises(ScheduleError, match=r"rank 0 runs 0B0 \(position 0\) before 0F0, which comes later \(position 1\)"):
        check(order)


def test_a_file_with_a_misspelt_action() -> None:
    with pytest.raises(ScheduleError, match=r"line 2, column 3 \(rank 1\): 'F2' is not an action; write stage, kind"):
        read_csv("0F0,0B0\n1F0,1B0,F2\n", one_way(num_stages=2, n_microbatches=1))


def test_nothing_is_received_from_before_stage_0() -> None:
    with pytest.raises(ScheduleError, match="0RECV_F3 on rank 0: nothing comes before stage 0"):
        counterpart(Action.parse("0RECV_F3"), rank=0)


def test_a_search_for_no_ranks() -> None:
    with pytest.raises(ScheduleError, match="num_ranks must be at least 1, got 0"):
        auto(0, 4, Costs.uniform(1))


def test_a_search_within_too_little_memory() -> None:
    with pytest.raises(ScheduleError, match=r"rank \d may hold 0.5, and one micro-batch alone needs 1"):
        auto(2, 4, Costs.uniform(2), Limits(peak=0.5))


def test_an_unknown_effort_of_the_search() -> None:
    with pytest.raises(ScheduleError, match='search must be "default" or "thorough", got \'deep\''):
        auto(2, 4, Costs.uniform(2), search="deep")


def test_a_search_with_costs_of_other_stages() -> None:
    with pytest.raises(ScheduleError, match="the costs cover 3 stages, and there are 2 ranks"):
        auto(2, 4, Costs.uniform(3))


def test_a_limit_in_bytes_without_the_bytes() -> None:
    with pytest.raises(ScheduleError, match="needs activation_bytes, one entry a stage: 0 for 2 stages"):
        auto(2, 4, Costs.uniform(2), Limits(capacity=(1e9, 1e9)))


def test_auto_is_no_family() -> None:
    with pytest.raises(ScheduleError, match="'auto' is a search, not a family"):
        make_order("auto", 2, 4)


def test_pairs_of_pipes_that_do_not_divide_the_stages() -> None:
    with pytest.raises(ScheduleError, match="pairs=3 must divide half of the number of stages, which is 8/2"):
        mirrored_pairs(num_stages=8, n_microbatches=8, pairs=3)


def test_a_problem_with_costs_of_other_stages() -> None:
    with pytest.raises(ScheduleError, match="costs for 3 stages and holds for 2, the placement has 2"):
        Problem.of(one_way(2, 4), Costs.uniform(3))


def test_computations_have_no_other_end() -> None:
    with pytest.raises(ScheduleError, match="0F1 on rank 0 is a computation and has no peer"):
        counterpart(Action.parse("0F1"), rank=0)


def test_interleaving_no_chunks() -> None:
    with pytest.raises(ScheduleError, match="chunks must be at least 1, got 0"):
        interleaved(num_ranks=2, chunks=0, n_microbatches=4)


def test_negative_seconds() -> None:
    with pytest.raises(ScheduleError, match=r"must be finite and not negative, got input_grad\[1\]=-1.0"):
        Costs(forward=(1.0, 1.0), input_grad=(1.0, -1.0), weight_grad=(1.0, 1.0))


def test_a_negative_latency() -> None:
    with pytest.raises(ScheduleError, match=r"latency must be finite and not negative, got -0\.5 s"):
        Costs.uniform(2, latency=-0.5)


def test_a_link_of_no_bandwidth() -> None:
    with pytest.raises(ScheduleError, match=r"above 0 bytes per second, got bytes_per_second=0\.0"):
        Costs(forward=(1.0,), input_grad=(1.0,), weight_grad=(1.0,), bytes_per_second=0.0)


def test_bytes_of_too_few_boundaries() -> None:
    with pytest.raises(ScheduleError, match="boundary_bytes has 1 entries for 2 boundaries"):
        Costs(forward=(1.0,) * 3, input_grad=(1.0,) * 3, weight_grad=(1.0,) * 3, boundary_bytes=(8,))


def test_backwards_of_too_few_stages() -> None:
    with pytest.raises(ScheduleError, match="backward covers 1 stages and forward 2"):
        Costs(forward=(1.0,) * 2, input_grad=(1.0,) * 2, weight_grad=(1.0,) * 2, backward=(2.0,))


def test_messages_cost_no_computation() -> None:
    with pytest.raises(ScheduleError, match="0SEND_F1 is a message, not a computation; ask message_seconds"):
        Costs.uniform(2).seconds(Action.parse("0SEND_F1"))


def test_computations_cost_no_message() -> None:
    with pytest.raises(ScheduleError, match="0F1 is a computation, not a message; ask seconds"):
        Costs.uniform(2).message_seconds(Action.parse("0F1"), 0)


def test_simulating_ranks_that_wait_for_each_other() -> None:
    order = read_csv("0B0,0F0\n1F0,1B0\n", one_way(num_stages=2, n_microbatches=1))
    with pytest.raises(ScheduleError, match="order 'csv' cannot proceed: "):
        simulate(order, Costs.uniform(2))


def test_certifying_ranks_that_wait_for_each_other() -> None:
    order = read_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", one_way(num_stages=2, n_microbatches=2))
    with pytest.raises(ScheduleError, match=r"its ranks wait for each other; check\(lower\(order\)\) names the actions"):
        certify(order, Costs.uniform(2))


def test_pipelines_of_ranks_that_wait_for_each_other() -> None:
    order = read_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", one_way(num_stages=2, n_microbatches=2))
    with pytest.raises(ScheduleError, match="order 'csv' cannot proceed: its ranks wait for each other"):
        simulate_fleet(order, Costs.uniform(2), pipelines=2)


def test_costs_of_another_number_of_stages() -> None:
    with pytest.raises(ScheduleError, match="the costs cover 3 stages, the order has 2"):
        simulate(lower(make_order("1f1b", 2, 4)), Costs.uniform(3))


def test_no_pipelines_side_by_side() -> None:
    with pytest.raises(ScheduleError, match="pipelines must be at least 1, got 0"):
        simulate_fleet(make_order("1f1b", 2, 4), Costs.uniform(2), pipelines=0)


def test_an_order_of_other_stages_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    assert main(["simulate", "--schedule", str(tmp_path / "own.csv"), "--stages", "2", "--microbatches", "1"]) == 1
    assert "the order has 3 stages, no multiple of --stages 2" in capsys.readouterr().err


def test_the_demo_on_a_python_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from fxchimera import FxChimeraError
    from fxchimera.demo.data import python_reference

    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FxChimeraError, match="use a full CPython"):
        python_reference()


@pytest.mark.parametrize(
    ("target", "source", "text"),
    [
        ("gone.py:build", None, "there is no file gone.py"),
        ("mine.py:biuld", "def build(): ...", "mine.py has no 'biuld'; it has build"),
        ("mine.py:build", "import torch\nraise KeyError(3)", r"importing mine.py raised KeyError: 3 \(.*mine.py:2\)"),
        ("mine.py:build", "def build():\n    return 1 / 0", r"mine.py:build raised ZeroDivisionError: .*mine.py:2"),
        ("mine.py:build", "import torch\ndef build():\n    return torch.nn.ReLU(), 1", "args of type int; args is a tuple"),
        ("mine.py:build", "import torch\ndef build():\n    return torch.nn.ReLU(), (1,), {}, 3", "a loss_fn of type int"),
    ],
)
def test_what_cannot_be_planned(
    target: str, source: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from fxchimera import FxChimeraError
    from fxchimera.planner.builders import build_example

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    if source is not None:
        Path("mine.py").write_text(source)
    with pytest.raises(FxChimeraError, match=text):
        build_example(target)
