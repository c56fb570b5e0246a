"""torch's process groups as the transport, here gloo's: what holds over sockets holds over them.

With gloo and tensors on the CPU, the code is that of NCCL and CUDA but for the backend and the streams, which ``tests/device`` has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxchimera
from tests import wide, workers
from tests.faults import faults
from tests.local.wrapped import wrap
from tests.models import MODELS
from tests.parity import assert_same_tensors
from tests.process import failing, grouped, messages
from tests.process.alike import union
from tests.process.culprits import assert_all_name_the_culprit
from tests.process.pool import Pool

pytestmark = pytest.mark.process


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.matrix)


@pytest.mark.parametrize(
    ("name", "stages", "n", "schedule"),
    [
        ("tied", 2, 4, "chimera"),
        ("mlp", 4, 5, "chimera"),
        slow("gpt2", 2, 2, "1f1b"),
        slow("gpt2", 4, 8, "chimera"),
        slow("resnet", 4, 5, "chimera"),
        slow("vit", 4, 4, "zbv"),
        slow("bert", 4, 6, "auto"),
        slow("skip", 4, 1, "gpipe"),
        slow("masked_rotary", 2, 3, "chimera"),
        slow("nn_transformer", 4, 2, "chimera"),
        slow("tied", 4, 8, "dualpipe"),
    ],
)
def test_training_is_bitwise_that_of_threads(processes: Pool, name: str, stages: int, n: int, schedule: str) -> None:
    """Three AdamW steps with clipping and dropout: losses, norms, gradients and the trained state."""
    expected = workers.train(name, stages, n, schedule)
    answers = processes.run(stages, grouped.over_groups, workers.train, name, stages, n, schedule)
    for answer in answers:
        assert all(map(torch.equal, answer["losses"], expected["losses"]))
        assert all(map(torch.equal, answer["norms"], expected["norms"]))
        assert answer["threads"] == []
    assert_same_tensors(union([answer["gradients"] for answer in answers]), expected["gradients"])
    assert_same_tensors(answers[0]["state"], expected["state"])


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (2, range(5)), (4, range(5, 8)),
        pytest.param(2, range(100, 400), marks=pytest.mark.torture), pytest.param(4, range(400, 1100), marks=pytest.mark.torture),
    ],
    ids=str,
)  # fmt: skip
def test_random_orders_bring_every_message_to_its_reader(processes: Pool, ranks: int, seeds: range) -> None:
    answers = processes.run(ranks, messages.walk, ranks, seeds, "groups", limit=60.0 + len(seeds))
    assert [wrong for _, wrong in answers] == [0] * ranks
    assert all(received > 0 for received, _ in answers)


@pytest.mark.parametrize(
    ("kind", "stages", "place"),
    [("kill", 4, 1), slow("forward", 4, 0), slow("backward", 2, 2), slow("kill", 2, 0), slow("leave", 4, 2), slow("loss", 4, 1)],
)
def test_every_survivor_names_the_culprit(processes: Pool, kind: str, stages: int, place: int) -> None:
    fault = faults(kind, stages)[place]
    assert_all_name_the_culprit(processes, fault, stages, "chimera", grouped.over_groups, failing.meet)


def test_a_message_in_the_place_of_another_is_refused(processes: Pool) -> None:
    answers = processes.run(2, messages.confuse)
    for error, text in answers:
        assert error == "PipelineError"
        assert text.startswith("rank 1 failed: expected activations for stage 1, micro-batch 1, but a message with the identity")


@pytest.mark.parametrize(("transport", "match"), [("udp", "'auto', 'sockets', 'groups'")])
def test_what_is_no_transport_is_refused(transport: Any, match: str) -> None:
    example = MODELS["mlp"](batch=4)
    with pytest.raises(fxchimera.FxChimeraError, match=match):
        wrap(example, 2, 2, transport=transport)


@pytest.mark.parametrize(
    ("name", "rows", "stages", "n", "schedule"), [("mlp", (13, 8), 2, 3, "chimera"), slow("resnet", (5, 2, 7, 4), 1, 2, "gpipe")]
)
def test_sums_over_pipelines_are_those_through_the_host(
    processes: Pool, name: str, rows: tuple[int, ...], stages: int, n: int, schedule: str
) -> None:
    work = (wide.train, name, rows, stages, n, schedule)
    there = processes.run(stages * len(rows), grouped.over_groups, *work)
    here = processes.run(stages * len(rows), *work)
    for one, other in zip(there, here, strict=True):
        assert all(map(torch.equal, one["losses"], other["losses"]))
        assert_same_tensors(one["gradients"], other["gradients"])
        assert_same_tensors(one["owned"], other["owned"])
        assert one["threads"] == []
        assert one["verified"][0], one["verified"][1]
