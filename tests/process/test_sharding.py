"""FSDP2 and tensor parallelism on stages: a 2 x 2 mesh of four processes, against the plain model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests import sharding
from tests.process.pool import Pool

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[2] / "tutorials" / "tools" / "sharded_llama.py"
CELLS = [("dp", "1f1b"), ("tp", "zbv")]
MORE = [
    pytest.param(kind, schedule, marks=pytest.mark.matrix) for kind, schedule in [("dp", "zbv"), ("tp", "1f1b"), ("dp", "auto")]
]


@pytest.mark.parametrize(("kind", "schedule"), [*CELLS, *MORE])
def test_gradients_and_parameters_are_those_of_the_plain_model(processes: Pool, kind: str, schedule: str) -> None:
    """The whole tensors, after every step; the loss of a pipeline is that of its own rows."""
    expected = sharding.plain()
    ranks = processes.run(4, sharding.train, kind, schedule)
    rows = {answer["own"]: answer["losses"] for answer in ranks}
    losses = [sum(pair) / 2 for pair in zip(rows[0], rows[1], strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=1e-12)
    for answer in ranks:
        for found, wanted in zip(answer["gradients"], expected["gradients"], strict=True):
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
        assert answer["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    for own in (0, 1):
        mine = [answer for answer in ranks if answer["own"] == own]
        assert {name for answer in mine for name in answer["gradients"][0]} == expected["gradients"][0].keys()
        inner = {name for name in expected["state"] if ".up." in name or ".down.weight" in name}
        assert {name for answer in mine for name in answer["sharded"]} >= (set(expected["state"]) if kind == "dp" else inner)
        stages = sorted(stage for answer in mine for stage in answer["called"])
        assert stages == list(range(4 if schedule == "zbv" else len(stages)))
        (state,) = [answer["state"] for answer in mine if answer["state"]]
        torch.testing.assert_close(state, expected["state"], rtol=1e-9, atol=1e-12)
        (changed,) = [answer["changed"] for answer in mine if answer["changed"]]
        torch.testing.assert_close(changed, {key: value + 1 for key, value in state.items()}, rtol=0.0, atol=0.0)
    whole = torch.cat([ranks[0]["output"], ranks[1]["output"]]) if kind == "dp" else ranks[0]["output"]
    torch.testing.assert_close(whole, expected["output"], rtol=1e-9, atol=1e-12)
    assert sum({a["own"]: a["evaluated"] for a in ranks}.values()) / 2 == pytest.approx(expected["evaluated"], rel=1e-9)
    for answer in ranks:
        (_, verify, _), (_, other, _) = answer["errors"]
        assert "parallelize has changed its stages" in verify
        assert "pass batches like the example" in other


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.matrix)])
def test_a_micro_batch_without_weight_in_one_of_the_pipelines(processes: Pool, schedule: str) -> None:
    """FSDP2 joins the two in every backward, so neither may leave one out; each loss is the mean over its own labels."""
    ranks = processes.run(4, sharding.masked, schedule)
    model, (x, _), y = sharding.build(), sharding.data(), sharding.labels()
    half = sharding.ROWS // 2
    losses = [sharding.nothing_is_nan(model(x[rows]), y[rows]) for rows in (slice(0, half), slice(half, None))]
    (sum(losses) / 2).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for answer in ranks:
        assert answer["loss"] == pytest.approx(float(losses[answer["own"]].detach()), rel=1e-12)
        for name, gradient in answer["gradients"].items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
    assert {name for answer in ranks for name in answer["gradients"]} == wanted.keys()


def llama(kind: str, schedule: str) -> float:
    error: float = runpy.run_path(str(SCRIPT))["main"](kind, schedule)
    return error


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "schedule"), [("dp", "zbv"), ("tp", "1f1b"), ("tp", "auto")])
def test_the_tutorials_llama(processes: Pool, kind: str, schedule: str) -> None:
    assert max(processes.run(4, llama, kind, schedule)) < 1e-12
