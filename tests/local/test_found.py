"""Ways in which a careful reader made a step silently wrong, hang, or fail without a word: each is right, or refused by name."""

from __future__ import annotations

import functools
import gc
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera import FxChimeraError, PipelineError
from tests.local.changing import BOTH, check
from tests.local.toys import WIDTH, Tanh, chain, data, plain, seeded, wrapped
from tests.parity import Outcome, assert_close, gradients_of

# ---------------------------------------------------------------------- hooks on parameters


@BOTH
def test_a_gradient_hook_sees_the_batchs_gradient_once(schedule: str) -> None:
    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))  # of a part it would be another

    check(lambda: chain(4), change, schedule)


@BOTH
def test_an_optimizer_may_live_in_post_accumulate_hooks(schedule: str) -> None:
    x, y = data(8)

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    model, reference = chain(4), chain(4)
    with wrapped(model, x, num_stages=4, n_microbatches=4, schedule=schedule) as pipe:
        for parameter in pipe.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        pipe.step(x, target=y)
    F.mse_loss(reference(x), y).backward()
    torch.optim.SGD(reference.parameters(), 0.1).step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


def test_a_hook_that_raises_changes_no_gradient() -> None:
    x, y = data(8)
    model = chain(4)
    F.mse_loss(model(x), y).backward()
    before = gradients_of(model)

    def hook(_gradient: Tensor) -> None:
        raise ValueError("not today")

    with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
        model[2].linear.weight.register_hook(hook)
        with pytest.raises(PipelineError, match="hook on a parameter: ValueError: not today"):
            pipe.step(x, target=y)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())  # type: ignore[arg-type]


# ---------------------------------------------------------------------- losses


def test_a_loss_that_reads_parameters_is_refused_by_name() -> None:
    x, y = data(8)
    model = chain(4)
    decay = lambda output, target: F.mse_loss(output, target) + sum(p.square().sum() for p in model.parameters())  # noqa: E731
    with (
        wrapped(model, x, loss_fn=decay, num_stages=4, n_microbatches=4) as pipe,
        pytest.raises(PipelineError, match=r"reads the parameter '\d\.linear\.(weight|bias)'"),
    ):
        pipe.step(x, target=y)


CLASSES = torch.tensor([0.1, 0.9, 5.0, 1.0, 1.0, 2.0], dtype=torch.float64)
LOSSES = {
    "class weights": nn.CrossEntropyLoss(weight=CLASSES),
    "partial": functools.partial(F.cross_entropy, ignore_index=0),
    "partial with weights": functools.partial(F.cross_entropy, weight=CLASSES),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_cross_entropy_is_weighted_by_what_torch_divides_by(kind: str) -> None:
    x, _ = data(8)
    y = torch.tensor([0, 0, 0, 1, 1, 2, 5, 4])  # the first micro-batch has ignored ones only
    model, reference = chain(4), chain(4)
    with wrapped(model, x, loss_fn=LOSSES[kind], num_stages=4, n_microbatches=4) as pipe:
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    assert_close(found, plain(reference, lambda m: LOSSES[kind](m(x), y)), 1e-12)


def test_the_backward_runs_outside_autocast() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Tanh() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                with torch.autocast("cpu", enabled=i != 2):
                    x = layer(x.float())
            return x.float()

    x, y = (t.float() for t in data(64))
    model, reference = seeded(Mixed).float(), seeded(Mixed).float()
    with torch.autocast("cpu", torch.bfloat16), wrapped(model, x, num_stages=2, n_microbatches=1, schedule="1f1b") as pipe:
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(reference(x), y)
    loss.backward()
    assert_close(found, Outcome(loss.detach(), gradients_of(reference)), 1e-6)


# ---------------------------------------------------------------------- calls


def test_a_second_thread_is_refused_instead_of_mixed_up() -> None:
    x, _ = data(8)
    model = chain(4)
    entered, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        entered.set()
        go_on.wait(10.0)

    with wrapped(model, x, num_stages=2, n_microbatches=2) as pipe:
        handle = model[0].linear.register_forward_hook(wait)
        thread = threading.Thread(target=lambda: pipe(x))
        thread.start()
        entered.wait(10.0)
        with pytest.raises(FxChimeraError, match="at work for another call"):
            pipe(x)
        go_on.set()
        thread.join()
        handle.remove()
        torch.testing.assert_close(pipe(x), model(x))


def test_clipping_gradients_that_have_not_come_yet_is_refused() -> None:
    x, y = data(8)
    with wrapped(chain(4), x, num_stages=2, n_microbatches=2) as pipe:
        with pipe.no_sync():
            pipe.step(x, target=y)
            with pytest.raises(FxChimeraError, match="1 steps under no_sync"):
                pipe.clip_grad_norm_(1.0)
        pipe.step(x, target=y)
        assert pipe.clip_grad_norm_(1.0).dtype == torch.float64


def test_a_default_device_is_none_of_our_messages_business() -> None:
    x, y = data(8)
    model, reference = chain(4), chain(4)
    torch.set_default_device("meta")
    try:
        with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
            found = Outcome(pipe.step(x, target=y), gradients_of(model))
            pipe.clip_grad_norm_(1e9)
    finally:
        torch.set_default_device(None)
    assert_close(found, plain(reference, lambda m: F.mse_loss(m(x), y)), 1e-12)


def test_verify_looks_at_the_imaginary_part_too() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0j
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            return x.abs()

    torch.manual_seed(0)
    x, y = data(8)
    with wrapped(Complex(), x, num_stages=2, n_microbatches=2) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")  # "discards the imaginary part"
        assert pipe.verify(x, target=y).bitwise


def test_fifty_steps_keep_no_tensor_and_no_thread() -> None:
    x, y = data(8)
    model = chain(4)

    def held() -> tuple[int, int]:
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects()), threading.active_count()

    with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        counts = []
        for number in range(51):
            optimizer.zero_grad()
            pipe.step(x, target=y)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            pipe.evaluate(x, target=y)
            if number in (5, 50):
                counts.append(held())
    assert counts[0] == counts[1]
