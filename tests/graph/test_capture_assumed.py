"""Answers that a recording assumes: what is assumed, where it is checked, and which path is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.assumed import Check, collecting
from fxchimera_passes.capture import capture, recapture
from fxchimera_passes.capture.interpret import interpret
from fxchimera_passes.capture.paths import Path, explore
from fxchimera_passes.captured import Assumption, Captured, info
from fxchimera_passes.cost import analytic, measured
from fxchimera_passes.errors import CaptureError
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan
from tests.branching import batches, build
from tests.graph.recorded import Branch, Two, data
from tests.graph.recorded import build as plain


def check_nodes(captured: Captured) -> list[str]:
    return [node.name for node in captured.graph.nodes if isinstance(node.target, Check)]


def answers(captured: Captured) -> list[bool | int]:
    return [assumption.answer for assumption in captured.assumed]


class Reading(Two):
    """Answers with the value that ``read`` reads."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read

    def between(self, x: Tensor) -> Tensor:
        found = eval(self.read, {"x": x, "torch": torch, "int": int})
        return x * 3 if found else x * 2


@pytest.mark.parametrize(
    "read",
    [
        "x.sum() > 1e9", "torch.is_nonzero(x.sum())", "int(x.sum() * 0 + 5)", "(x.sum() > 0).item()", "x.argmax().item()",
        "torch.equal(x, x + 1)", "torch.allclose(x, x)", "[0] * x.argmax()", "x[0, 0] in x", "not (x > 1e9).any()",
    ],
)  # fmt: skip
def test_true_answers_give_the_plain_result_and_wrong_ones_are_found(read):
    model, x = plain(lambda: Reading(read)), data()
    captured, expected = capture(model, (x,), {}), model(x)
    assert len(captured.assumed) == len(check_nodes(captured)) == 1
    assert captured.assumed[0].line.startswith(("<string>", __file__)) or captured.assumed[0].line
    for _ in range(2):
        with collecting() as found:
            (result,) = interpret(captured, [x])
        if not found:
            break
        with pytest.raises(CaptureError, match="but the graph was recorded for"):
            interpret(captured, [x])
        captured = recapture(captured, (x,), {}, training=True, path=Path((found[0],), captured.assumed))
        assert answers(captured) == [found[0]]
    assert not found
    assert torch.equal(result, expected)


@pytest.mark.parametrize("read", ["float(x.sum())", "x.sum().item() > 0", "x.tolist()", "x.detach().numpy().any()"])
def test_other_values_are_refused_as_before(read):
    with pytest.raises(CaptureError, match=r"depends on .*submodule"):
        capture(plain(lambda: Reading(read)), (data(),), {})


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind", ["branches", "early_exit", "ponder"])
def test_every_check_survives_the_cut_in_the_stage_of_its_operand(kind, stages):
    captured = capture(build(kind), (batches(1)[0],), {}, num_stages=stages)
    plan = make_plan(captured, analytic(captured), stages)
    where = {name: stage.index for stage in plan.stages for name in stage.nodes}
    nodes = {node.name: node for node in captured.graph.nodes}
    for name in check_nodes(captured):
        assert where[name] == max(where[source.name] for source in nodes[name].all_input_nodes)
        assert not nodes[name].users
    written = [node for graph in split(captured, plan) for node in graph.graph.nodes if isinstance(node.target, Check)]
    assert sorted(node.target.assumption.ordinal for node in written) == list(range(len(captured.assumed)))


def test_an_operand_computed_long_before_it_is_read_does_not_tie_the_stages_together():
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            positive = x.sum() > 0
            for layer in self.layers[1:]:
                x = layer(x)
            return x if positive else -x

    captured = capture(Early().double(), (data(),), {}, num_stages=4)
    plan = make_plan(captured, analytic(captured), 4)
    assert any(check_nodes(captured)[0] in stage.nodes for stage in plan.stages[:2])
    assert all(value.meta.dtype != torch.bool for stage in plan.stages for value in stage.sent)


def test_an_operand_that_was_written_meanwhile_is_read_as_it_is_then():
    class Written(Two):
        def between(self, x: Tensor) -> Tensor:
            flag = x.detach().abs().sum().reshape(1)
            view = flag[:]
            view.zero_()
            return x if flag > 0 else -x

    model, x = plain(Written), data()
    captured = capture(model, (x,), {})
    assert answers(captured) == [False]
    assert torch.equal(interpret(captured, [x])[0], model(x))


def test_a_small_module_is_closed_and_a_large_one_is_assumed():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Branch() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if x.sum() > 0 else block(x) * 2
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.last = Wide(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.wide(x))

    captured = capture(Model().double(), (data(),), {}, num_stages=2)
    assert "wide" in captured.open_modules
    assert len(captured.assumed) == 3, "the first reads an input, which is a guard"
    assert captured.open_modules.isdisjoint(f"wide.blocks.{index}" for index in range(4))


def test_planning_takes_the_path_that_reads_most_and_places_the_rest_beside_it():
    captured = capture(build("branches"), (batches(1)[0],), {}, num_stages=4)
    read = {name for node in captured.graph.nodes for name in info(node).parameters}
    assert read | captured.beside.keys() == set(captured.parameters)
    assert captured.beside["yes.2.weight"].startswith("layers.2.")
    plan = make_plan(captured, analytic(captured), 4)
    for name, neighbour in captured.beside.items():
        assert plan.owner[name] == plan.owner[neighbour]
        assert name in plan.stages[plan.owner[name]].parameters


def test_a_loop_that_waits_for_true_ends_in_the_recording():
    class Wait(Two):
        def between(self, x: Tensor) -> Tensor:
            while not x.norm() < 1:
                x = x / 2
            return x

    assert answers(capture(plain(Wait), (data(),), {})).count(True) == 1


def test_an_assertion_is_assumed_to_hold():
    class Asserting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                assert x.isfinite().all(), "not finite"
                if x.isnan().any():
                    raise ValueError("nan")
            return x

    model, x = Asserting().double(), data()
    captured = capture(model, (x,), {}, num_stages=4)
    assert answers(captured) == [True, False] * 9
    assert torch.equal(interpret(captured, [x])[0], model(x))
    with pytest.raises(CaptureError, match="AssertionError: not finite"):
        recapture(captured, (x,), {}, training=True, path=Path((False,), captured.assumed))


def test_a_loop_that_no_answer_ends_is_refused():
    class Endless(Two):
        def between(self, x: Tensor) -> Tensor:
            while x.norm() < 1 or not x.norm() < 1:
                x = x / 2
            return x

    with pytest.raises(CaptureError, match="after 1000 such reads"):
        capture(plain(Endless), (data(),), {})


def test_measuring_costs_goes_on_where_an_answer_is_wrong():
    captured = capture(build("ponder"), (batches(1)[0],), {})
    assert measured(captured, (batches(1)[0],), {}, repeats=1).forward.keys() >= set(check_nodes(captured))


def test_exploring_turns_answers_over_until_everything_is_read():
    """The tree: a False reads x; a True reads y, and then b True reads z."""

    def record(path: Path) -> tuple[bool, ...]:
        a = path.answers[0] if path.answers else False
        b = path.answers[1] if len(path.answers) > 1 else False
        return (a, b) if a else (a,)

    def reads(made: tuple[bool, ...]) -> list[Assumption]:
        return [Assumption(ordinal=i, description="", line="ab"[i], answer=answer) for i, answer in enumerate(made)]

    def parameters(made: tuple[bool, ...]) -> list[str]:
        return ["start", "y", *(["z"] if made[1] else []), "end"] if made[0] else ["start", "x", "end"]

    explored = explore(record(Path()), record, reads, parameters, {"start", "x", "y", "z", "end"})
    assert explored.recording == (True, True)
    read = set(parameters(explored.recording))
    assert read | explored.beside.keys() == {"start", "x", "y", "z", "end"}
    assert explored.beside["x"] == "start"
