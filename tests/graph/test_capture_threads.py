"""A recording belongs to one thread: others call modules and functions meanwhile as if nothing were there."""

from __future__ import annotations

import threading

import torch
from torch import nn

from fxchimera_passes.capture import capture, interpret
from tests.models import MODELS


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_second_thread_calls_modules_meanwhile():
    example = MODELS["masked_rotary"](dtype=torch.float64)
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3)
    expected = 2 * other(x).detach()
    stop, started, wrong, calls = threading.Event(), threading.Event(), [], [0]

    def work() -> None:
        while not stop.is_set():
            y = Double.apply(other(x))
            if type(y) is not torch.Tensor or not torch.equal(y.detach(), expected):
                wrong.append(y)
            calls[0] += 1
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    before = calls[0]
    try:
        captured = capture(example.model, example.args, example.kwargs, num_stages=8)
    finally:
        stop.set()
        thread.join()
    assert calls[0] > before
    assert not wrong
    alone = capture(example.model, example.args, example.kwargs, num_stages=8)
    assert str(alone.graph) == str(captured.graph)


def test_two_threads_capture_one_after_the_other():
    results = {}

    def work(name: str) -> None:
        example = MODELS[name](dtype=torch.float64)
        captured = capture(example.model, example.args, example.kwargs, num_stages=4)
        with torch.no_grad():
            results[name] = torch.equal(interpret(captured, list(example.args))[0], example.model(*example.args))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("mlp", "skip", "tied")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(("mlp", "skip", "tied"), True)
