"""Keyed randomness: draws depend on (seed, step, micro-batch, key) alone."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from fxchimera_passes.captured import RandomKey
from fxchimera_passes.keyed import HOST_ORDINAL, is_random, keyed_random, microbatch_randomness, seed_of
from fxchimera_passes.scope import Scope, call_in_scope

KEY = RandomKey("block.drop", 0, 0)


def draw(keys=(KEY,), *, seed=1, step=2, microbatch=3, function=lambda: torch.rand(8)):
    with microbatch_randomness(seed, step, microbatch), keyed_random(keys):
        return function()


def test_an_operation_draws_what_torch_draws_with_that_seed():
    generator = torch.Generator().manual_seed(seed_of(1, 2, 3, KEY))
    assert torch.equal(draw(), torch.rand(8, generator=generator))


@pytest.mark.parametrize("other", [{"seed": 9}, {"step": 9}, {"microbatch": 9}, {"keys": (RandomKey("block.drop", 1, 0),)}])
def test_every_part_of_the_name_matters(other):
    assert not torch.equal(draw(), draw(**other))


def test_seeds_are_the_same_in_another_process():
    code = "from fxchimera_passes.keyed import seed_of; from fxchimera_passes.captured import RandomKey;"
    code += "print(seed_of(1, 2, 3, RandomKey('block.drop', 0, 0)))"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(result.stdout) == seed_of(1, 2, 3, KEY)


def test_operations_are_counted_and_the_list_continues():
    keys = (KEY, RandomKey("other", 0, 4))

    def thrice():
        return [torch.rand(4) for _ in range(3)]

    expected = [draw((key,), function=lambda: torch.rand(4)) for key in (*keys, RandomKey("other", 0, 5))]
    assert all(torch.equal(a, b) for a, b in zip(draw(keys, function=thrice), expected, strict=True))


def test_the_users_generators_do_not_move():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    draw((KEY, RandomKey("block.drop", 0, HOST_ORDINAL)), function=lambda: (torch.rand(3), random.random(), np.random.rand()))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_python_and_numpy_draw_from_the_key_when_the_recording_saw_them():
    keys = (RandomKey("block.drop", 0, HOST_ORDINAL),)
    numbers = [draw(keys, microbatch=m, function=lambda: (random.random(), np.random.rand())) for m in (0, 0, 1)]
    assert numbers[0] == numbers[1] != numbers[2]


def test_outside_a_micro_batch_nothing_changes():
    torch.manual_seed(5)
    with keyed_random((KEY,)):
        inside = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(inside, torch.rand(4))


def test_a_generator_of_the_users_own_is_put_back():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    first = draw(function=lambda: torch.rand(4, generator=generator))
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(first, draw(function=lambda: torch.rand(4, generator=torch.Generator().manual_seed(8))))


def test_threads_that_share_the_generator_do_not_disturb_each_other():
    expected = [draw(microbatch=m, function=lambda: torch.rand(1000)) for m in range(4)]
    wrong = []

    def work(m):
        for _ in range(100):
            if not torch.equal(draw(microbatch=m, function=lambda: torch.rand(1000)), expected[m]):
                wrong.append(m)

    threads = [threading.Thread(target=work, args=(m,)) for m in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_dropout_inside_attention_is_caught():
    q = torch.randn(2, 2, 5, 8)
    results = [draw(function=lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), microbatch=m) for m in (0, 0, 1)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_lstm_dropout_is_caught():
    torch.manual_seed(0)
    lstm, x = torch.nn.LSTM(4, 4, 2, dropout=0.5), torch.randn(3, 2, 4)
    results = [draw(function=lambda: lstm(x)[0], microbatch=m) for m in (0, 0, 1)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_attention_without_dropout_does_not_count():
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.randn(2, 2, 5, 8)
    assert not is_random(flash, (q, q, q), {})
    assert is_random(flash, (q, q, q, 0.1), {})
    assert not is_random(torch.ops.aten.native_dropout.default, (q, 0.5, False), {})
    assert is_random(torch.ops.aten.native_dropout.default, (q, 0.5, True), {})
    assert not is_random(torch.ops.aten.add.Tensor, (q, q), {})


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_masks_of_the_forward(reentrant):
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Tanh()) for _ in range(3)
    )
    keys = tuple(RandomKey(f"{i}.1", 0, 0) for i in range(3))
    gradients = []
    original = torch.utils.checkpoint.CheckpointFunction
    for again in (False, True):
        layers.zero_grad()
        x = torch.ones(4, 8, requires_grad=True)
        with microbatch_randomness(1, 1, 1), keyed_random(keys):
            h = x
            for layer in layers:
                h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=reentrant) if again else layer(h)
        torch.rand(3)  # the user's stream moves on
        h.sum().backward()
        gradients.append([x.grad, *(p.grad for p in layers.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert torch.utils.checkpoint.CheckpointFunction is original


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_checkpointing_leaves_the_global_generator_to_other_threads(keys, reentrant, monkeypatch):
    """Torch would set its state in the backward, without asking a thread that draws from it; here nothing draws without a name."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5 if keys else 0.0))
    with microbatch_randomness(1, 1, 1):
        with keyed_random(keys):
            y = torch.utils.checkpoint.checkpoint(layer, torch.ones(4, 8, requires_grad=True), use_reentrant=reentrant)
        monkeypatch.setattr(torch, "set_rng_state", lambda _state: pytest.fail("the generator is set"))
        y.sum().backward()
    assert layer[0].weight.grad is not None


def test_a_scope_sets_and_restores_its_surroundings():
    def state():
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    before = state()
    assert call_in_scope(Scope(grad=False, autocast=("cpu", torch.bfloat16, True)), state) == (False, True, torch.bfloat16)
    assert state() == before
    assert call_in_scope(Scope(), state) == before
