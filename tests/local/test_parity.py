"""A pipeline's step equals the plain model's, for every model of the zoo: within rounding, or bitwise where that is promised.

Every test takes a cell (model, D, N, schedule).  The default run has a covering subset: each model with every D and every kind of
N, and each D with every kind of N and every schedule.  All cells run under ``-m matrix``.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS, Example
from tests.parity import TOLERANCE, adamw_steps, assert_bitwise, assert_close, full_batch, micro_batch_loop

STAGES = (1, 2, 4, 8)
SCHEDULES = ("chimera", "1f1b", "gpipe")
BATCH_NORM = {"resnet"}
OWN_LOSS_IN_FLOAT32 = {"gpt2"}  # transformers computes a language model's loss as cross_entropy(logits.float())

Cell = tuple[str, int, int, str]


def counts(stages: int) -> tuple[int, int, int, int]:
    return 1, stages, 2 * stages, 2 * stages + 1


def covering() -> list[Cell]:
    """Every model with every D, each time with another kind of N: a Latin square; the schedules rotate over it."""
    cells = []
    for row, name in enumerate(MODELS):
        for column, stages in enumerate(STAGES):
            schedule = SCHEDULES[(row // 4 + column + row) % 3]
            cells.append((name, stages, counts(stages)[(row + column) % 4], schedule))
    return cells


def matrix() -> list[Any]:
    cells = itertools.product(MODELS, STAGES, range(4), SCHEDULES[:2])
    unique = dict.fromkeys((name, stages, counts(stages)[kind], schedule) for name, stages, kind, schedule in cells)
    return [pytest.param(*cell, marks=pytest.mark.matrix) for cell in unique if cell not in covering()]


def build(name: str, n: int, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Example:
    """An example whose rows do not divide by ``n`` > 1."""
    return MODELS[name](dtype=dtype, batch=2 * n + 1, dropout=dropout)


def in_float64(example: Example) -> Example:
    """Take the loss out of a model that computes it in float32 whatever its dtype."""
    kwargs = dict(example.kwargs)
    labels = kwargs.pop("labels")
    return example._replace(kwargs=kwargs, target=labels, loss_fn=next_token_loss)


def next_token_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_the_covering_subset_covers_what_it_says() -> None:
    cells = covering()
    kinds = {(name, stages, n, schedule): counts(stages).index(n) for name, stages, n, schedule in cells}
    assert {(c[0], c[1]) for c in cells} == set(itertools.product(MODELS, STAGES))
    assert {(c[1], kind) for c, kind in kinds.items() if c[1] > 1} == set(itertools.product(STAGES[1:], range(4)))
    assert {(c[1], c[3]) for c in cells} == set(itertools.product(STAGES, SCHEDULES))
    assert {(c[0], c[3]) for c in cells} == set(itertools.product(MODELS, SCHEDULES))


@pytest.mark.parametrize(("name", "stages", "n", "schedule"), [*covering(), *matrix()])
def test_float64_step_and_five_optimizer_steps(name: str, stages: int, n: int, schedule: str) -> None:
    example, plain = build(name, n), build(name, n)
    if name in OWN_LOSS_IN_FLOAT32:
        example, plain = in_float64(example), in_float64(plain)
    loop = n if name in BATCH_NORM else None
    expected = full_batch(plain) if loop is None else micro_batch_loop(plain, loop)
    with wrap(example, stages, n, schedule) as pipe:
        found = step(pipe, example)
        assert_close(found, expected, TOLERANCE[torch.float64])
        optimizer = torch.optim.AdamW(pipe.parameters())
        losses = [found.loss]
        optimizer.step()
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(step(pipe, example).loss)
            optimizer.step()
    again = build(name, n) if name not in OWN_LOSS_IN_FLOAT32 else in_float64(build(name, n))
    torch.testing.assert_close(losses, adamw_steps(again, 5, loop), rtol=1e-9, atol=0.0)
    expected_state = again.model.state_dict()
    for key, value in example.model.state_dict().items():
        torch.testing.assert_close(value, expected_state[key], rtol=0.0, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("name", "stages", "n", "schedule"), [*covering()[2::4], *matrix()])
def test_float32_step(name: str, stages: int, n: int, schedule: str) -> None:
    example, plain = build(name, n, torch.float32), build(name, n, torch.float32)
    expected = micro_batch_loop(plain, n) if name in BATCH_NORM else full_batch(plain)
    with wrap(example, stages, n, schedule) as pipe:
        assert_close(step(pipe, example), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_a_model_with_its_own_float32_loss_holds_float32_tolerance(schedule: str) -> None:
    """The loss's gradient is rounded to float32 before it enters the float64 model, in the plain step too: 1e-12 cannot be."""
    example, plain = build("gpt2", 4), build("gpt2", 4)
    expected = full_batch(plain)
    assert expected.loss.dtype == torch.float32
    with wrap(example, 4, 4, schedule) as pipe:
        assert_close(step(pipe, example), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize(("name", "stages", "n", "schedule"), [*covering()[1::4], *covering()[3::8], *covering()[6::8], *matrix()])
def test_dropout_is_bitwise_the_reference(name: str, stages: int, n: int, schedule: str) -> None:
    example, plain = (build(name, n, torch.float32, dropout=0.2) for _ in range(2))
    with wrap(example, stages, n, schedule) as pipe:
        losses = []
        for number in range(2):
            example.model.zero_grad()
            found = step(pipe, example)
            assert_bitwise(found, reference(plain, stages, n, schedule, step=number))
            losses.append(float(found.loss))
    assert losses[0] != losses[1], "another step must draw other masks"
    for key, value in example.model.state_dict().items():  # batch norm's statistics: the same up to the last rounding
        torch.testing.assert_close(value, plain.model.state_dict()[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt2", "resnet", "tied"])
def test_two_runs_are_bitwise_equal_also_under_jitter(name: str) -> None:
    runs = [_training_run(name, jitter) for jitter in (None, None, random.Random(5))]
    for run in runs[1:]:
        for found, expected in zip(run, runs[0], strict=True):
            assert_bitwise(found, expected)


def _training_run(name: str, jitter: random.Random | None) -> list[Any]:
    """Two SGD steps at D=4; with jitter every leaf module sleeps for up to 2 ms before it runs."""
    example = build(name, 5, torch.float32, dropout=0.1)
    if jitter is not None:
        for module in example.model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(lambda *_: time.sleep(jitter.random() * 2e-3))
    outcomes = []
    with wrap(example, 4, 5) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            outcomes.append(step(pipe, example))
            optimizer.step()
    return outcomes


@pytest.mark.parametrize("name", ["mlp", "skip", "masked_rotary"])
def test_masks_do_not_depend_on_stages_or_schedule(name: str) -> None:
    """At a fixed N every micro-batch sees the same masks, so its loss has the same bits; gradient sums may associate otherwise."""
    outcomes = []
    for stages, schedule in ((1, "gpipe"), (2, "chimera"), (4, "1f1b"), (8, "chimera"), (4, "gpipe")):
        example = build(name, 4, dropout=0.3)
        with wrap(example, stages, 4, schedule) as pipe:
            outcomes.append(step(pipe, example))
    for found in outcomes[1:]:
        assert torch.equal(found.loss, outcomes[0].loss)
        assert_close(found, outcomes[0], TOLERANCE[torch.float64])


def test_another_seed_draws_other_masks() -> None:
    losses = set()
    for seed in (1, 2):
        example = build("mlp", 2, dropout=0.3)
        with wrap(example, 2, 2, seed=seed) as pipe:
            losses.add(float(step(pipe, example).loss))
    assert len(losses) == 2
