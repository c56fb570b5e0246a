"""What a step that fails or is interrupted leaves: an error that names the place, the gradients of before, and no threads."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera import PipelineError
from tests.local.toys import chain, data, wrapped
from tests.parity import assert_same_tensors, gradients_of


def moody(trouble: BaseException | Callable[[], None]) -> tuple[nn.Sequential, Callable[[int], None]]:
    """A chain whose third layer has a hook, and a function that arms it: so many more calls pass, then the hook makes trouble."""
    model = chain(4)
    passes: list[int] = []

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if passes:
            passes[0] -= 1
            if passes[0] < 0:
                if isinstance(trouble, BaseException):
                    raise trouble
                trouble()

    model[2].register_forward_hook(hook)
    return model, passes.append


@pytest.mark.parametrize(("stages", "schedule"), [(1, "chimera"), (2, "chimera"), (4, "1f1b")])
def test_an_error_in_the_users_code_names_its_place(stages: int, schedule: str) -> None:
    """The original is the cause, the earlier gradients are intact, and the pipeline refuses to go on."""
    x, y = data(8)
    error = ValueError("planted mistake")
    model, arm = moody(error)
    with wrapped(model, x, num_stages=stages, n_microbatches=4, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        before = gradients_of(model)
        arm(2)
        with pytest.raises(PipelineError, match=r"stage \d \((down|up)\), micro-batch \d.*ValueError: planted mistake") as caught:
            pipe.step(x, target=y)
        assert _root_cause(caught.value) is error
        assert_same_tensors(gradients_of(model), before)
        for call in (lambda: pipe.step(x, target=y), lambda: pipe(x), lambda: pipe.evaluate(x, target=y)):
            with pytest.raises(PipelineError, match="planted mistake"):
                call()


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_an_error_in_the_loss_function_names_its_place() -> None:
    x, y = data(8)
    armed: list[bool] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if armed:
            raise RuntimeError("no loss today")
        return F.mse_loss(output, target)

    with wrapped(chain(4), x, loss_fn=loss_fn, num_stages=2, n_microbatches=4) as pipe:
        pipe.step(x, target=y)
        armed.append(True)
        with pytest.raises(PipelineError, match=r"stage 1 .*no loss today"):
            pipe.step(x, target=y)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also in the background job of a shell, which begins with ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("where", ["in a rank", "in the caller"])
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stays_what_it_is_and_leaves_nothing(where: str, stages: int) -> None:
    """No threads after close, and the gradients of before."""
    x, y = data(8)
    threads = threading.active_count()
    model, arm = moody(KeyboardInterrupt() if where == "in a rank" else _thread.interrupt_main)
    pipe = wrapped(model, x, num_stages=stages, n_microbatches=4)
    pipe.step(x, target=y)
    before = gradients_of(model)
    arm(1)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=y)
    assert_same_tensors(gradients_of(model), before)
    start = time.monotonic()
    pipe.close()
    assert threading.active_count() == threads
    assert time.monotonic() - start < 5.0
