"""What a run on a wrong path leaves behind is undone: Python attributes, buffers, and errors that it caused.

The witness is the plain model, micro-batch by micro-batch.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import fxchimera
from tests.branching import WIDTH, Watched, batches, plain_step, square
from tests.local.toys import seeded
from tests.moving import Counter, Guarded, Moving, TiedAround, TwoNorms

pytestmark = pytest.mark.filterwarnings("ignore:.*depends on parameters", "ignore:the model has been recorded")


def wrap(model: nn.Module, x: Tensor, stages: int, n: int, schedule: str) -> fxchimera.Pipeline:
    return fxchimera.pipeline(model, example_args=(x,), loss_fn=square, num_stages=stages, n_microbatches=n, schedule=schedule)


def assert_same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("stages", "n", "schedule"), [(4, 3, "1f1b"), (2, 3, "zbv")])
def test_attributes_of_a_mirror_are_put_back(stages: int, n: int, schedule: str) -> None:
    model, plain = seeded(TiedAround), seeded(TiedAround)
    with wrap(model, batches(1, 9)[0], stages, n, schedule) as pipe:
        for x in batches(3, 9):
            torch.testing.assert_close(pipe.step(x), plain_step(plain, x, n), rtol=1e-12, atol=0)
        assert pipe._attempts.repeated > 0
    assert_same_gradients(model, plain)


def rows_that_answer(model: Watched, answers: tuple[bool, ...]) -> Tensor:
    """Micro-batches of two rows for which ``model``, a :class:`Guarded`, gives these answers."""
    generator, found = torch.Generator().manual_seed(1), list[Tensor]()
    model.log = []
    for answer in answers:
        for _ in itertools.count():
            part = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                model(part)
            if model.log[-1] == answer:
                found.append(part)
                break
    return torch.cat(found)


@pytest.mark.parametrize("odd", [True, False])
def test_an_error_that_only_another_micro_batchs_wrong_path_caused_does_not_count(odd: bool) -> None:
    """Micro-batch 3 is on the right path, but its state was written by one that was not."""
    x = rows_that_answer(seeded(Guarded), (odd, odd, not odd, odd))
    model, plain = seeded(Guarded), seeded(Guarded)
    with torch.no_grad():
        for part in list(x.chunk(4))[:3]:
            plain(part)
    model.limit.most = float(plain.limit.seen) * 1.001
    plain = seeded(Guarded)
    with wrap(model, x, 2, 4, "1f1b") as pipe:
        torch.testing.assert_close(pipe.step(x), plain_step(plain, x, 4), rtol=1e-12, atol=0)
        assert pipe._attempts.repeated > 0
    assert_same_gradients(model, plain)
    torch.testing.assert_close(model.limit.seen, plain.limit.seen)


@pytest.mark.parametrize(("stages", "schedule"), [(4, "1f1b"), (2, "zbv")])
def test_a_buffer_that_two_paths_write_in_different_stages_is_refused_by_name(stages: int, schedule: str) -> None:
    model, x = seeded(Moving, 3), batches(1, 9)[0]
    with wrap(model, x, stages, 3, schedule) as pipe:
        earlier_and_last = r"buffer 'mean' is written in forward and used in the stages \[[0-2], 3\]"
        with pytest.raises(fxchimera.FxChimeraError, match=earlier_and_last):
            pipe.step(x)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not model.mean.any()


def test_one_micro_batch_may_write_a_buffer_wherever_its_path_does() -> None:
    model, plain = seeded(Moving, 3), seeded(Moving, 3)
    with wrap(model, batches(1, 9)[0], 4, 1, "1f1b") as pipe:
        for x in batches(4, 9):
            torch.testing.assert_close(pipe.step(x), plain_step(plain, x, 1), rtol=1e-12, atol=0)
        assert pipe._attempts.repeated > 0
    assert_same_gradients(model, plain)
    torch.testing.assert_close(model.mean, plain.mean)


@pytest.mark.parametrize(
    ("stages", "n", "schedule", "momentum"), [(4, 4, "chimera", 0.1), (2, 4, "dualpipe", 0.2), (2, 2, "chimera", None)]
)
def test_statistics_of_layers_that_only_some_paths_use(stages: int, n: int, schedule: str, momentum: float | None) -> None:
    """The two copies of a stage see micro-batches of different paths, and so different layers."""
    model, plain = (seeded(lambda: TwoNorms(momentum), 3) for _ in range(2))
    xs = batches(3, 4 * n)
    with wrap(model, xs[0], stages, n, schedule) as pipe:
        for x in xs:
            torch.testing.assert_close(pipe.step(x), plain_step(plain, x, n), rtol=1e-12, atol=0)
        model.eval(), plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(pipe(xs[0]), torch.cat([plain(part) for part in xs[0].chunk(n)]))
    assert_same_gradients(model, plain)
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def test_verify_leaves_python_state_as_it_was_and_starts_the_plain_model_from_it() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Counter())

    model, plain, x = seeded(build), seeded(build), batches(1)[0]
    with wrap(model, x, 2, 2, "1f1b") as pipe:
        pipe.step(x)
        plain_step(plain, x, 2)
        assert pipe.verify(x).bitwise
        torch.testing.assert_close(pipe.step(x), plain_step(plain, x, 2), rtol=1e-12, atol=0)
    assert_same_gradients(model, plain)
