"""The sample of the zoo through the one line: a step, an evaluation after training and a second batch, against the plain model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fxchimera
from tests.local.toys import seeded
from tests.local.wrapped import reference
from tests.models import Example
from tests.parity import (
    TOLERANCE,
    Outcome,
    assert_bitwise,
    assert_close,
    assert_same_tensors,
    gradients_of,
    micro_batch_loop,
    split,
)
from tests.zoo_sample import SAMPLE
from tests.zoo_sample_models import WIDTH, Layers

STAGES, SEED = 4, 7
RANDOM = {"Noise", "StochasticDepth", "PythonCoins"}
CELLS = [(1, "1f1b"), (2, "chimera")]


def second(example: Example) -> Example:
    """Another batch of the same shapes."""
    tensors = {id(t): torch.roll(t, 1, -1) for t in (*example.args, *example.kwargs.values()) if isinstance(t, torch.Tensor)}
    kwargs = {name: tensors.get(id(value), value) for name, value in example.kwargs.items()}
    return example._replace(args=tuple(tensors[id(value)] for value in example.args), kwargs=kwargs)


def expected_of(name: str, plain: Example, n: int, schedule: str, step: int) -> Outcome:
    """What the plain model gives for its batch, under the same keyed randomness where it draws."""
    plain.model.zero_grad()
    if name not in RANDOM:
        return micro_batch_loop(plain, n)
    found = fxchimera.reference(
        plain.model, *plain.args, target=plain.target, loss_fn=plain.loss_fn, num_stages=STAGES, n_microbatches=n,
        schedule=schedule, seed=SEED, step=step, **plain.kwargs,
    )  # fmt: skip
    return Outcome(found.loss, found.gradients)


@pytest.mark.filterwarnings("ignore:.*(saves no memory|every micro-batch|has been recorded)")
@pytest.mark.parametrize(("n", "schedule"), CELLS)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_the_sample_equals_the_plain_one(name: str, n: int, schedule: str) -> None:
    example, plain = SAMPLE[name](), SAMPLE[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*recorded one by one")
        pipe = fxchimera.pipeline(
            example.model, example_args=example.args, example_kwargs=example.kwargs, loss_fn=example.loss_fn,
            num_stages=STAGES, n_microbatches=n, schedule=schedule, seed=SEED,
        )  # fmt: skip
    with pipe:
        for step, (ours, theirs) in enumerate(((example, plain), (second(example), second(plain)))):
            example.model.zero_grad()
            loss = pipe.step(*ours.args, target=ours.target, **ours.kwargs)
            found, expected = Outcome(loss, gradients_of(example.model)), expected_of(name, theirs, n, schedule, step)
            if name in RANDOM:
                assert_bitwise(found, expected)
            else:
                assert_close(found, expected, TOLERANCE[torch.float64])
            assert_same_tensors(dict(example.model.named_buffers()), dict(plain.model.named_buffers()))
            with torch.no_grad():
                for model in (example.model, plain.model):
                    for key, parameter in model.named_parameters():
                        if (gradient := found.gradients[key]) is not None:
                            parameter -= 0.1 * gradient
        loss = pipe.evaluate(*example.args, target=example.target, **example.kwargs)
    plain.model.eval()
    with torch.no_grad():
        losses = [piece.loss(piece.model(*piece.args, **piece.kwargs)) for piece in split(plain, n)]
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-12, atol=0)


class Shared(Layers):
    """Reads a parameter once and uses it in every stage; the plain model cannot tell these uses apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * 1.0
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale + scale
        return x


@pytest.mark.parametrize("name", ["Embedded", "LongSkip", "Shared"])
def test_the_reference_counts_every_use_of_a_shared_parameter(name: str) -> None:
    """A tied head read under its own name, a weight read beside its layer's call, and one parameter of all stages."""
    example = SAMPLE[name]() if name in SAMPLE else SAMPLE["LongSkip"]()._replace(model=seeded(Shared))
    found = reference(example, STAGES, 2, "1f1b")
    assert_close(found, micro_batch_loop(example, 2), TOLERANCE[torch.float64])
