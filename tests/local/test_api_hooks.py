"""The user's hooks run as in the plain model, and nothing of the pipeline stays in the user's model, in threads or in memory."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.local.toys import chain, data, plain, wrapped
from tests.local.wrapped import step, wrap
from tests.models import MODELS
from tests.parity import Outcome, assert_bitwise, assert_close, gradients_of

# ---------------------------------------------------------------------- hooks


@pytest.mark.parametrize(("stages", "schedule"), [(1, "chimera"), (2, "chimera"), (4, "chimera"), (4, "1f1b")])
def test_hooks_fire_once_a_micro_batch(stages: int, schedule: str) -> None:
    """They fire in recordings too, so those come first: at wrap and, for the smaller micro-batches, in the first step."""
    x, y = data(7)
    model = chain(4)
    fired: Counter[str] = Counter()
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, i=index: fired.update([f"before {i}"]))
        layer.register_forward_hook(lambda *_, i=index: fired.update([f"after {i}"]))
        if index:  # torch warns about a backward hook on a module whose input needs no gradient
            layer.register_full_backward_hook(lambda *_, i=index: fired.update([f"back {i}"]))
    with wrapped(model, x, num_stages=stages, n_microbatches=5, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        fired.clear()
        pipe.step(x, target=y)
        assert fired == {f"{what} {i}": 5 for i in range(4) for what in ("before", "after", "back")[: 3 if i else 2]}


def test_a_hook_that_changes_the_output_counts() -> None:
    x, y = data(8)

    def build() -> nn.Sequential:
        model = chain(4)
        model[1].register_forward_hook(lambda module, inputs, output: output * 2)
        return model

    model = build()
    with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    assert_close(found, plain(build(), lambda m: F.mse_loss(m(x), y)), 1e-12)


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_gradient_hooks_on_parameters_run_in_both_directions(schedule: str) -> None:
    """Registered before or after wrapping, on tied parameters too; verify and the reference know them."""
    example, reference = (MODELS["tied"](dtype=torch.float64, batch=8) for _ in range(2))
    example.model.embed.weight.register_hook(lambda gradient: gradient * 3)
    with wrap(example, 4, 4, schedule) as pipe:
        late = example.model.blocks[0][1].weight.register_hook(lambda gradient: -gradient)
        found = step(pipe, example)
        assert pipe.verify(*example.args, target=example.target).bitwise
        late.remove()
        example.model.zero_grad()
        second = step(pipe, example)
    expected = plain(reference.model, lambda m: reference.loss(m(*reference.args)))
    wanted = dict(expected.gradients)
    wanted["embed.weight"] = wanted["embed.weight"] * 3
    assert_close(second, Outcome(expected.loss, wanted), 1e-12)
    wanted["blocks.0.1.weight"] = -wanted["blocks.0.1.weight"]
    assert_close(found, Outcome(expected.loss, wanted), 1e-12)


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_hooks_on_accumulated_gradients_see_the_whole_gradient(schedule: str) -> None:
    x, y = data(8)
    expected = plain(chain(4), lambda m: F.mse_loss(m(x), y)).gradients["1.linear.weight"]
    model = chain(4)
    seen: list[Tensor] = []
    model[1].linear.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule=schedule) as pipe:
        pipe.step(x, target=y)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------- afterwards


@pytest.mark.parametrize("name", ["resnet", "tied", "gpt2"])
def test_the_users_model_is_its_own_again_after_close(name: str) -> None:
    example = MODELS[name](batch=9, dropout=0.1)
    before = _identity(example.model)
    with wrap(example, 4, 4) as pipe:
        step(pipe, example)
        pipe.evaluate(*example.args, target=example.target, **example.kwargs)
    pipe.close()
    assert _identity(example.model) == before
    example.model.zero_grad()
    example.loss(example.model(*example.args, **example.kwargs)).backward()
    assert all(p.grad is not None for p in example.model.parameters())


def _identity(model: nn.Module) -> Any:
    """Every object that hangs on the model: modules, parameters, buffers, hooks, attributes."""
    return {
        name: (
            id(module),
            module.training,
            {key: id(p) for key, p in module._parameters.items()},
            {key: id(b) for key, b in module._buffers.items()},
            [len(table) for key, table in sorted(vars(module).items()) if key.endswith("_hooks") and table is not None],
            sorted(vars(module)),
            module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward,
        )
        for name, module in model.named_modules()
    }


def test_two_pipelines_of_one_model() -> None:
    """One after the other, and side by side."""
    example = MODELS["mlp"](batch=8, dropout=0.1)
    first = wrap(example, 4, 4)
    one = step(first, example)
    second = wrap(example, 2, 4, "1f1b")
    example.model.zero_grad()
    two = step(second, example)
    example.model.zero_grad()
    first.close()
    assert torch.equal(one.loss, two.loss)
    assert_bitwise(step(wrap(example, 4, 4), example), one)
    second.close()


def test_twenty_steps_leave_nothing_behind() -> None:
    """Threads, live tensors and micro-batches in flight are what they were."""
    example = MODELS["resnet"](batch=9, dropout=0.1)
    with wrap(example, 4, 4) as pipe:
        counts = []
        for number in range(20):
            step(pipe, example)
            example.model.zero_grad()
            if number in (2, 19):
                counts.append((threading.active_count(), _live_tensors()))
        replicas = [replica for executor in pipe._engine.executors for replica in executor.replicas.values()]
        assert [replica.in_flight for replica in replicas] == [0] * 8
    assert counts[0] == counts[1]


def test_close_ends_the_threads_and_may_be_repeated() -> None:
    before = threading.active_count()
    example = MODELS["mlp"](batch=8)
    pipe = wrap(example, 4, 4)
    assert threading.active_count() > before
    step(pipe, example)
    pipe.close()
    pipe.close()
    assert threading.active_count() == before


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())
