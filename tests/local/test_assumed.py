"""Branches on values that depend on parameters: assumed while recording, checked in every run, and the run repeated when wrong.

The witness is the plain model, whose branches go as they go; where dropout is drawn it is ``fxchimera.reference``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxchimera
from tests.branching import WIDTH, batches, build, plain_step, square

pytestmark = pytest.mark.filterwarnings("ignore:.*depends on parameters", "ignore:the model has been recorded")


def wrap(model: nn.Module, x: Tensor, stages: int, n: int, schedule: str = "chimera") -> fxchimera.Pipeline:
    return fxchimera.pipeline(
        model, example_args=(x,), loss_fn=square, num_stages=stages, n_microbatches=n, schedule=schedule, seed=7
    )


def assert_equal_parameters(found: nn.Module, expected: nn.Module) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["branches", "early_exit", "ponder"])
@pytest.mark.parametrize(
    ("stages", "n", "schedule"),
    [
        (2, 4, "chimera"), (4, 2, "chimera"), pytest.param(2, 1, "1f1b", marks=pytest.mark.matrix),
        pytest.param(4, 4, "1f1b", marks=pytest.mark.matrix), pytest.param(4, 1, "chimera", marks=pytest.mark.matrix),
        pytest.param(2, 2, "gpipe", marks=pytest.mark.matrix),
    ],
)  # fmt: skip
def test_training_equals_the_plain_model_while_paths_change(kind, stages, n, schedule):
    log: list[bool] = []
    model, plain = build(kind), build(kind, log)
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    paths = []
    with wrap(model, batches(1)[0], stages, n, schedule) as pipe:
        own = torch.optim.SGD(pipe.parameters(), 0.5)
        for x in batches(5):
            log.clear()
            expected = plain_step(plain, x, n)
            paths.append(tuple(log))
            torch.testing.assert_close(pipe.step(x), expected, rtol=1e-12, atol=0)
            for which in (optimizer, own):
                which.step()
                which.zero_grad()
        assert pipe._attempts.repeated > 0
    assert len(set(paths)) > 1, paths
    assert_equal_parameters(model, plain)


@pytest.mark.parametrize("kind", ["branches", "early_exit", "ponder"])
def test_evaluation_and_forward_follow_the_plain_model(kind):
    model, plain = build(kind), build(kind)
    first, second = batches(2)
    with wrap(model, first, 4, 2) as pipe:
        for x in (first, second):
            with torch.no_grad():
                torch.testing.assert_close(pipe.evaluate(x), plain_step(plain, x, 2, backward=False), rtol=1e-12, atol=0)
                expected = [plain(part) for part in x.chunk(2)]
            found = pipe(x)
            if kind == "early_exit":
                torch.testing.assert_close(found[0], torch.cat([y for y, _ in expected]))
            else:
                torch.testing.assert_close(found, torch.cat(expected))


def test_a_path_that_has_been_right_is_tried_first():
    x = batches(1)[0]
    with wrap(build("branches"), x, 2, 4) as pipe:
        pipe.step(x)
        first = pipe._attempts.repeated
        assert first > 0
        for _ in range(3):
            pipe.step(x)
        assert pipe._attempts.repeated == first
        pipe.evaluate(x)
        before = pipe._attempts.repeated
        pipe.evaluate(x)
        pipe.step(x)
        assert pipe._attempts.repeated == before


def test_gradients_left_by_no_sync_survive_a_repeated_run():
    log: list[bool] = []
    model, plain = build("branches"), build("branches", log)
    xs = batches(3)
    with wrap(model, xs[0], 4, 4) as pipe:
        counts = []
        with pipe.no_sync():
            for x in xs[:2]:
                pipe.step(x)
                counts.append(pipe._attempts.repeated)
        pipe.step(xs[2])
        counts.append(pipe._attempts.repeated)
    assert counts[0] < counts[1] < counts[2], "every step was to be repeated"
    for x in xs:
        plain_step(plain, x, 4)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("n", "schedule"), [(1, "1f1b"), (4, "1f1b"), (4, "chimera")])
def test_statistics_of_batch_norm_count_a_micro_batch_once(n, schedule):
    model, plain = build("branches", norm=True), build("branches", norm=True)
    with wrap(model, batches(1)[0], 2, n, schedule) as pipe:
        for x in batches(3):
            pipe.step(x)
            plain_step(plain, x, n)
        assert pipe._attempts.repeated > 0
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_a_repeated_run_draws_the_same_masks(schedule):
    model, plain = build("branches", dropout=0.4), build("branches", dropout=0.4)
    xs = batches(3)
    with wrap(model, xs[0], 4, 4, schedule) as pipe:
        for step, x in enumerate(xs):
            pipe.step(x)
            expected = fxchimera.reference(
                plain, x, loss_fn=square, num_stages=4, n_microbatches=4, schedule=schedule, seed=7, step=step
            )
            for name, parameter in model.named_parameters():
                wanted = expected.gradients[name]
                assert parameter.grad is wanted if wanted is None else torch.equal(parameter.grad, wanted), name
            model.zero_grad()
        assert pipe._attempts.repeated > 0
        assert pipe.verify(xs[1]).bitwise


def test_verify_agrees_after_it_had_to_repeat():
    with wrap(build("ponder"), batches(1)[0], 2, 2) as pipe:
        result = pipe.verify(batches(2)[1])
        assert pipe._attempts.repeated > 0
        assert result.ok, str(result)


class Counting(nn.Module):
    """Changes a Python attribute and a buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0))
        return y


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.head = Counting(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.count(x)
        if y.sum() > 0:
            y = torch.tanh(y)
        z = self.head(y)
        return z if z.mean() > 0 else -z


def test_an_undone_run_leaves_no_trace_in_buffers_and_attributes():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Stateful().double())
    model, plain = models
    with wrap(model, batches(1)[0], 2, 4, "1f1b") as pipe:
        for x in batches(2):
            pipe.step(x)
            plain_step(plain, x, 4)
        assert pipe._attempts.repeated > 0
    assert model.count.calls == plain.count.calls
    torch.testing.assert_close(model.count.mean, plain.count.mean, rtol=1e-12, atol=1e-13)


def test_hooks_on_parameters_run_once():
    model, calls = build("branches"), []
    model.layers[0].weight.register_hook(lambda gradient: calls.append("hook"))
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
    with wrap(model, batches(1)[0], 2, 2) as pipe:
        pipe.step(batches(1)[0])
        assert pipe._attempts.repeated > 0
    assert calls == ["hook", "after"]


def test_the_user_is_told_once_a_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(build("branches"), batches(1)[0], 2, 2).close()
    told = [str(warning.message) for warning in caught if "depends on parameters" in str(warning.message)]
    assert len(told) == 1
    assert "branching.py:" in told[0]
    assert "submodule" in told[0]
