"""Several pipelines side by side, each with a shard of its own, over real processes.

The witness is plain torch on all shards together, in float64; batch norm needs the micro-batches one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import fxchimera
from tests import wide
from tests.faults import Fault
from tests.local.wrapped import wrap
from tests.models import MODELS
from tests.parity import Outcome, assert_close, assert_same_tensors
from tests.process import failing
from tests.process.alike import union
from tests.process.pool import Pool

pytestmark = pytest.mark.process

CELLS = [("mlp", (13, 8), 2, 3, "chimera"), ("tied", (6, 9), 2, 4, "auto")]
MORE = [  # the pool has eight processes
    (name, (13, 18), stages, n, schedule)
    for name in MODELS
    for stages, n, schedule in ((2, 5, "chimera"), (2, 2, "1f1b"), (2, 4, "zbv"), (4, 4, "chimera"), (4, 9, "1f1b"), (4, 8, "auto"))
]


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.matrix)


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.stop()


def assert_trained_as_plain(
    answers: list[dict[str, Any]], name: str, rows: tuple[int, ...], n: int, stages: int, times: int = 1
) -> None:
    """Gradients within 1e-12, the losses and the state of five AdamW steps within 1e-9, replicas equal to the last bit.

    A model of transformers that computes its own loss does so in single precision, whatever its parameters are.
    """
    expected, state = wide.expected_steps(name, rows, n, len(answers[0]["losses"]), times)
    single = answers[0]["losses"][0].dtype is torch.float32
    once, later = (1e-6, 1e-4) if single else (1e-12, 1e-9)
    for number, answer in enumerate(answers):
        assert answer["place"] == (number // stages, len(rows))
        assert all(map(torch.equal, answer["losses"], answers[0]["losses"])), "every rank has the same loss"
        assert torch.equal(answer["norm"], answers[0]["norm"])
        assert answer["threads"] == []
        assert answer["verified"][0], answer["verified"][1]
    for loss, plain in zip(answers[0]["losses"], expected, strict=True):
        torch.testing.assert_close(loss, plain.loss.to(loss.dtype), rtol=later, atol=0.0)
    for pipeline in range(len(rows)):
        ranks = answers[pipeline * stages : (pipeline + 1) * stages]
        gradients = union([answer["gradients"] for answer in ranks])
        assert_close(Outcome(answers[0]["losses"][0], gradients), expected[0], once)
        for first, answer in zip(answers, ranks, strict=False):
            assert_same_tensors(answer["owned"], first["owned"])
    assert answers[0]["state"].keys() == state.keys()
    for key, value in answers[0]["state"].items():
        torch.testing.assert_close(value, state[key], rtol=later, atol=later)


@pytest.mark.parametrize(("name", "rows", "stages", "n", "schedule"), CELLS)
def test_uneven_shards_train_as_the_plain_model(
    processes: Pool, name: str, rows: tuple[int, ...], stages: int, n: int, schedule: str
) -> None:
    answers = processes.run(stages * len(rows), partial(wide.train, name, rows, stages, n, schedule))
    assert_trained_as_plain(answers, name, rows, n, stages)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "rows", "stages", "n", "schedule"), MORE)
def test_every_model_trains_as_the_plain_one(
    eight: Pool, name: str, rows: tuple[int, ...], stages: int, n: int, schedule: str
) -> None:
    answers = eight.run(stages * len(rows), partial(wide.train, name, rows, stages, n, schedule), limit=240.0)
    assert_trained_as_plain(answers, name, rows, n, stages)


def test_four_pipelines_of_one_rank(processes: Pool) -> None:
    """Plain data parallelism, of three sizes; the sum over pipelines has more than one order now, and ``verify`` knows it."""
    rows = (5, 2, 7, 4)
    answers = processes.run(4, partial(wide.train, "resnet", rows, 1, 2, "gpipe"))
    assert_trained_as_plain(answers, "resnet", rows, 2, 1)


@pytest.mark.parametrize(("name", "schedule"), [("resnet", "chimera"), slow("tied", "1f1b")])
def test_no_sync_leaves_the_sum_to_the_last_step(processes: Pool, name: str, schedule: str) -> None:
    rows = (7, 5)
    answers = processes.run(4, partial(wide.train, name, rows, 2, 2, schedule, steps=2, skipped=2))
    assert_trained_as_plain(answers, name, rows, 2, 2, times=3)


def test_mirrors_on_two_nodes(processes: Pool) -> None:
    """Pipeline 0 is on the processes 0 and 2, pipeline 1 on 1 and 3."""
    rows = (5, 3)
    answers = processes.run(4, wide.train_apart, rows)
    expected, state = wide.expected_steps("mlp", rows, 2, 1)
    assert [place for (place, _), *_ in answers] == [0, 1, 0, 1]
    assert answers[0][0][1] == answers[1][0][1] != answers[2][0][1] == answers[3][0][1]
    assert [count for *_, count in answers] == [len(state), 0, 0, 0]
    for ranks in (answers[::2], answers[1::2]):
        assert_close(Outcome(ranks[0][1], union([gradients for _, _, gradients, _ in ranks])), expected[0], 1e-12)


def test_replicas_are_bit_identical_after_20_steps_with_dropout(processes: Pool) -> None:
    answers = processes.run(4, partial(wide.train, "mlp", (6, 5), 2, 2, "chimera", steps=20, dropout=0.2))
    for first, second in zip(answers[:2], answers[2:], strict=True):
        assert_same_tensors(first["owned"], second["owned"])
    assert all(answer["verified"][0] for answer in answers), answers[0]["verified"][1]


def test_two_pipelines_drop_what_one_with_all_micro_batches_drops(processes: Pool) -> None:
    """Micro-batch m of pipeline w draws as number w N + m: the loss is that of one pipeline to the last bit."""
    answers = processes.run(4, partial(wide.train, "mlp", (4, 4), 2, 2, "1f1b", steps=1, dropout=0.3))
    example = MODELS["mlp"](batch=8, dtype=torch.float64, dropout=0.3)
    with wrap(example, 2, 4, "1f1b") as pipe:
        loss = pipe.step(*example.args, target=example.target, **example.kwargs)
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert torch.equal(answers[0]["losses"][0], loss)
    assert_close(Outcome(loss, union([answer["gradients"] for answer in answers[2:]])), Outcome(loss, gradients), 1e-12)


@pytest.mark.filterwarnings("ignore:.*depends on parameters")
@pytest.mark.parametrize("ways", [(0, 1), (1, 0)])
def test_shards_may_take_different_paths(processes: Pool, ways: tuple[int, int]) -> None:
    """A parameter may have a gradient in one pipeline only; one pipeline alone may have assumed wrong."""
    answers = processes.run(4, partial(wide.train_routed, ways))
    for half in (answers[:2], answers[2:]):
        found = union([gradients for _, gradients, _, _ in half])
        loss, _, plain, expected = half[0]
        assert_close(Outcome(loss, found), Outcome(plain, expected), 1e-12)


def test_the_other_calls(processes: Pool) -> None:
    """Weights are pipeline 0's; an output is that of the own shard, a validation loss that of all."""
    answers = processes.run(4, partial(wide.use_everything, 2, 3))
    first = answers[0]
    assert all(answer["start"] == {} for answer in answers[1:])
    plain = MODELS["mlp"]().model
    plain.load_state_dict(first["start"])
    plain.eval()
    parts = wide.shards("mlp", (7, 4))
    outputs = [plain(*part.args) for part in parts]
    for number, answer in enumerate(answers):
        torch.testing.assert_close(answer["output"], outputs[number // 2])
        assert torch.equal(answer["loss"], first["loss"])
        assert (answer["profiled"], answer["ranks"]) == (2, {0, 1})
        assert answer["made"] > 0
    targets = torch.cat([part.target for part in parts if part.target is not None])
    torch.testing.assert_close(first["loss"], torch.nn.functional.cross_entropy(torch.cat(outputs), targets))
    assert_same_tensors(first["loaded"], {key: value * 2 for key, value in first["start"].items()})
    assert_same_tensors(union([answer["owned"] for answer in answers[2:]]), union([answer["owned"] for answer in answers[:2]]))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("batch", "the ranks of a pipeline must pass the same batch, but passed rank 2"),
        slow("values", "the values on ranks [3] differ from those on rank 2"),
        ("rows", "2 rows cannot be divided into n_microbatches=4"),
        ("loss_scale", "all pipelines must make a call in the same mode and with the same loss_scale"),
        slow("call", "the ranks make different calls: rank 0 step, rank 1 step, rank 2 evaluate, rank 3 evaluate"),
    ],
)
def test_a_mistake_in_one_pipeline_is_an_error_on_every_rank(processes: Pool, kind: str, said: str) -> None:
    for error, text, seconds in processes.run(4, wide.mistakes, kind):
        assert error == "BatchError"
        assert said in text
        assert seconds < 10.0


def test_a_failure_names_the_pipeline(processes: Pool) -> None:
    answers = processes.run(4, wide.fail_in_forward, spoils=True)
    texts = {text for first, again in answers for _, text, _ in (first, again)}
    assert len(texts) == 1, "every rank names the same cause"
    text = texts.pop()
    assert text.startswith("rank 3 failed: pipeline 1, its rank 1, stage 1 (down), micro-batch 0, action 1F0: ValueError: planted")


@pytest.mark.parametrize("schedule", ["chimera", slow("1f1b")])
def test_a_killed_rank_is_named_in_every_pipeline(processes: Pool, schedule: str) -> None:
    answers = processes.survivors(4, 3, failing.meet, Fault("kill", 3, 2), 2, schedule)
    assert len(answers) == 3
    for error, text, seconds, again, _, closing in answers.values():
        assert error == again == "PipelineError"
        assert text.startswith("rank 3 failed: pipeline 1, its rank 1, "), text
        assert max(seconds, closing) < 20.0


def test_a_loss_that_is_not_finite_is_named_with_its_pipeline(processes: Pool) -> None:
    for (error, text, _), gradients, good in processes.run(4, wide.not_finite):
        assert error == "NonFiniteLossError"
        assert "micro-batch 2 (up) of pipeline 1 (inf)" in text
        assert gradients == 0
        assert good


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("width", "needs 6 ranks (num_stages=2, data_parallel=3), but torch.distributed has a world of 4"),
        ("sparse", "'0.weight' has layout torch.sparse_coo, which cannot be summed over pipelines"),
        slow("sharded", "parallelize has sharded a stage, but these processes are 2 pipelines"),
        ("buffer", "buffer 'mean' is written in forward outside batch norm, which data_parallel=2 with its copies of each stage"),
    ],
)
def test_what_data_parallelism_does_not_take(processes: Pool, kind: str, said: str) -> None:
    for _, text, _ in processes.run(4, wide.refused, kind, spoils=kind == "sparse"):
        assert said in text


def test_one_batch_for_all_pipelines_is_warned_of(processes: Pool) -> None:
    assert processes.run(4, wide.forget_to_shard) == [True, False, False, False]


def test_threads_are_one_pipeline() -> None:
    with pytest.raises(fxchimera.FxChimeraError, match="data_parallel=2 needs processes"):
        wrap(MODELS["mlp"](), 2, 2, data_parallel=2)
