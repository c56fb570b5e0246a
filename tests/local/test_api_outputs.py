"""Forward-only calls, where the batch dimension is, and the names and values of the state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from fxchimera import FxChimeraError
from fxchimera_passes.structure import flatten
from tests.local.toys import WIDTH, Tanh, chain, data, plain, seeded, wrapped
from tests.local.wrapped import wrap
from tests.models import MODELS
from tests.parity import Outcome, assert_close, assert_same_tensors, gradients_of

# ---------------------------------------------------------------------- outputs


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Any]


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = chain(4), kind

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return {
            "tensor": lambda: y,
            "tuple with None": lambda: (y, None, 3),
            "dict": lambda: {"a": y, "b": [y.argmax(-1), "text"]},
            "dataclass": lambda: Answer(y, {"mean": y.mean(), "mask": y > 0}),
        }[self.kind]()


@pytest.mark.parametrize("kind", ["tensor", "tuple with None", "dict", "dataclass"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_call_returns_the_plain_models_structure_and_values(kind: str, n: int) -> None:
    """P19."""
    x, _ = data(7)
    expected = seeded(lambda: Structured(kind)).eval()(x)
    model = seeded(lambda: Structured(kind))
    with wrapped(model, x, num_stages=2, n_microbatches=n) as pipe:
        pipe.eval()
        found = pipe(x)
    tensors, structure = flatten(found)
    wanted, wanted_structure = flatten(expected)
    assert repr(structure) == repr(wanted_structure)
    assert type(found) is type(expected)
    for a, b in zip(tensors, wanted, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-14)


def test_a_call_runs_in_the_current_mode() -> None:
    example = MODELS["mlp"](dtype=torch.float64, batch=8, dropout=0.5)
    with wrap(example, 2, 4) as pipe:
        noisy = pipe(*example.args)
        pipe.eval()
        quiet = pipe(*example.args)
        torch.testing.assert_close(quiet, example.model(*example.args).detach(), rtol=1e-12, atol=1e-14)
        assert not torch.allclose(noisy, quiet)
        assert pipe.train() is pipe
        assert example.model.training
    assert all(parameter.grad is None for parameter in example.model.parameters())


# ---------------------------------------------------------------------- batch dimensions


class BatchSecond(nn.Module):
    """A recurrent model with (time, batch, features) input, and a mask over time that is the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, keep: Tensor) -> Tensor:
        return (self.head(self.second(self.first(x)[0])[0]) * keep[:, None, None]).mean(0)


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_chunk_specs(schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 7, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(7, WIDTH, generator=generator, dtype=torch.float64)
    keep = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    expected = plain(seeded(BatchSecond), lambda model: F.mse_loss(model(x, keep=keep), y))
    model = seeded(BatchSecond)
    with wrapped(
        model, x, example_kwargs={"keep": keep}, args_chunk_spec=(TensorChunkSpec(1),), kwargs_chunk_spec={"keep": None},
        num_stages=2, n_microbatches=3, schedule=schedule,
    ) as pipe:  # fmt: skip
        assert_close(Outcome(pipe.step(x, keep=keep, target=y), gradients_of(model)), expected, 1e-12)


def test_a_target_with_its_batch_second() -> None:
    x, y = data(7)
    expected = plain(chain(4), lambda model: F.mse_loss(model(x), y))
    model = chain(4)
    loss_fn = lambda output, target: F.mse_loss(output, target.T)  # noqa: E731
    with wrapped(model, x, loss_fn=loss_fn, target_chunk_spec=TensorChunkSpec(1), num_stages=2, n_microbatches=3) as pipe:
        assert_close(Outcome(pipe.step(x, target=y.T), gradients_of(model)), expected, 1e-12)


# ---------------------------------------------------------------------- names and state


class Twelve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tanh() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_names_are_the_models_own() -> None:
    """P20: a ModuleList of 12; saved at D=4, loaded at 2 and 1 and into the plain model."""
    x, _ = data(8)
    expected = seeded(Twelve).state_dict()
    with wrapped(seeded(Twelve), x, num_stages=4, n_microbatches=4) as pipe:
        saved = pipe.state_dict()
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in seeded(Twelve).named_parameters()]
        assert_same_tensors(pipe.state_dict(full=False), expected)
    assert list(saved) == list(expected)
    assert_same_tensors(saved, expected)
    for stages in (2, 1):
        model = seeded(Twelve, 9)
        with wrapped(model, x, num_stages=stages, n_microbatches=4) as pipe:
            pipe.load_state_dict(saved)
            assert_same_tensors(pipe.state_dict(), expected)
        assert_same_tensors(model.state_dict(), expected)
    seeded(Twelve, 9).load_state_dict(saved, strict=True)


def test_the_saved_state_is_a_copy() -> None:
    x, _ = data(8)
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=2) as pipe:
        saved = pipe.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    assert_same_tensors(saved, chain(4).state_dict())


def test_parameters_are_the_users_own_objects_and_may_be_overwritten() -> None:
    """Weights swapped in by ``data.copy_`` (EMA) or ``.data =`` are what the next step uses, in both directions."""
    x, y = data(8)
    model, other = chain(4), seeded(lambda: nn.Sequential(*(Tanh() for _ in range(4))), 8)
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        assert all(a is b for a, b in zip(pipe.parameters(), model.parameters(), strict=True))
        pipe.step(x, target=y)
        for index, (parameter, wanted) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
            parameter.grad = None
            if index % 2:
                parameter.data = wanted.detach().clone()
            else:
                parameter.data.copy_(wanted)
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    assert_close(found, plain(other, lambda m: F.mse_loss(m(x), y)), 1e-12)


class Scaled(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = Tanh()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


@pytest.mark.parametrize(("stages", "closed"), [(4, False), (4, True)])
def test_buffers_may_be_written_between_steps_but_not_always_replaced(stages: int, closed: bool) -> None:
    """A closed module reads its own attribute, so a new tensor there counts; a buffer read by the pipeline itself is refused."""
    x, y = data(8)

    def build() -> nn.Module:
        model = seeded(lambda: nn.Sequential(*(Scaled() for _ in range(4))))
        for layer in model if closed else ():
            layer.register_forward_hook(lambda *_: None)  # modules with hooks are never opened
        return model

    model, reference = build(), build()
    with wrapped(model, x, num_stages=stages, n_microbatches=4) as pipe:
        for m in (model, reference):
            m[0].scale.fill_(2.0)
            if closed:
                m[3].scale = torch.full((WIDTH,), 3.0, dtype=torch.float64)
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
        assert torch.equal(pipe.state_dict()["3.scale"], reference[3].scale)
        if not closed:
            model[3].scale = torch.ones(WIDTH, dtype=torch.float64)
            with pytest.raises(FxChimeraError, match=r"'3\.scale' is another object"):
                pipe.step(x, target=y)
    assert_close(found, plain(reference, lambda m: F.mse_loss(m(x), y)), 1e-12)
