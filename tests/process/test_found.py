"""What a careful reader found between processes: hangs and silent differences; each is right, or refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import found
from tests.local.toys import chain, data
from tests.parity import Outcome, assert_close
from tests.process.pool import Pool

pytestmark = pytest.mark.process


def assert_gradients(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    zero = torch.zeros(())
    union = {name: gradient for part in parts for name, gradient in part.items()}
    assert_close(Outcome(zero, {name: union[name] for name in expected}), Outcome(zero, expected), 1e-12)


def test_a_pipeline_can_be_made_again_under_torchrun(processes: Pool) -> None:
    """Torchrun's store remembers a destroyed group's addresses; the second one waited for ever at these."""
    for losses, threads, group_left, hook_restored in processes.run(2, found.twice):
        assert len(set(losses)) == 1
        assert (threads, group_left, hook_restored) == ([], False, True)


def test_two_pipelines_do_not_mix_and_the_last_one_ends_the_group(processes: Pool) -> None:
    answers = processes.run(2, found.two_alive)
    assert_gradients([answer[0] for answer in answers], found.plain_gradients(4))
    assert_gradients([answer[1] for answer in answers], found.plain_gradients(6))
    assert all(answer[2:] == (True, False) for answer in answers)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("values", "values on ranks [1] differ"),
        ("loss_scale", "loss_scale 2"),
        ("mode", "0 of 9 modules in training mode"),
        ("no_sync", "rank 1 step under no_sync"),
        ("input gradients", "requires a gradient"),
    ],
)
def test_ranks_that_differ_where_shapes_agree_are_refused(processes: Pool, kind: str, text: str) -> None:
    for name, message, seconds in processes.run(2, found.differ, kind):
        assert name == "BatchError"
        assert text in message
        assert seconds < 5.0


def test_different_collective_calls_are_told_apart(processes: Pool) -> None:
    for name, message, seconds in processes.run(2, found.different_calls):
        assert name == "FxChimeraError"
        assert "rank 0: clip_grad_norm_()" in message
        assert "rank 1: the start of a step" in message
        assert seconds < 5.0


def test_owners_decide_what_is_frozen(processes: Pool) -> None:
    expected = {name: g if name.endswith("weight") else None for name, g in found.plain_gradients().items()}
    assert_gradients(processes.run(2, found.freeze_owned), expected)


def test_a_hook_on_an_owned_parameter_sees_the_batchs_gradient_once(processes: Pool) -> None:
    answers = processes.run(2, found.hooks_on_owned)
    assert_gradients([answer[0] for answer in answers], {n: g.clamp(-0.005, 0.005) for n, g in found.plain_gradients().items()})
    assert all(calls == len(part) for part, calls in answers)


def test_module_hooks_registered_after_wrapping_run_on_both_copies(processes: Pool) -> None:
    x, y = data(8)
    model = chain(4)
    for layer in model:
        layer.linear.register_forward_hook(lambda _m, _i, output: output * 2)
    F.mse_loss(model(x), y).backward()
    assert_gradients(processes.run(2, found.set_attributes), {name: p.grad for name, p in model.named_parameters()})


def test_a_rank_that_fails_outside_the_pipeline_tells_the_others(processes: Pool) -> None:
    (other, text, _), (own, _, _) = processes.run(2, found.fail_outside, spoils=True)
    assert own == "KeyError"
    assert other == "PipelineError"
    assert "rank 1 failed: the caller left the pipeline: KeyError: 'no such file'" in text
