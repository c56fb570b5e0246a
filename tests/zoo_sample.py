"""The default run's part of the zoo: ``SAMPLE[name]()`` builds an :class:`Example` in float64, the same in every call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Example, seeded
from tests.zoo_sample_models import (
    WIDTH,
    WORDS,
    Autocast,
    Checkpointed,
    CustomFunction,
    DataclassOut,
    DictCache,
    Embedded,
    InplaceResidual,
    KeywordOnly,
    LongSkip,
    NoGradRegion,
    Noise,
    Parametrized,
    PowersAndReads,
    PythonCoins,
    Selected,
    Siamese,
    SliceAssign,
    StochasticDepth,
    TensorHooks,
    Vmapped,
)

__all__ = ["SAMPLE"]

ROWS = 4
SAMPLE: dict[str, Callable[[], Example]] = {}


def mean_square(output: Any, _target: Any = None) -> Tensor:
    """A loss of every tensor in ``output`` that requires a gradient or is a floating-point one."""
    return sum((t.abs().square().mean() for t in tensors(output) if t.is_floating_point()), torch.zeros((), dtype=torch.float64))


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in items for tensor in tensors(item)]


def sample(build: Callable[[], nn.Module], *shapes: tuple[int, ...], **kwargs: Any) -> None:
    """Register a model by its class's name, with normal inputs of these shapes."""

    def example() -> Example:
        with seeded(0) as generator:
            model = build().double().train()
            inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes or ((ROWS, WIDTH),)]
        return Example(model, tuple(inputs), dict(kwargs), torch.zeros(ROWS), mean_square)

    SAMPLE[build.__name__] = example


for _model in (
    *(DataclassOut, CustomFunction, Checkpointed, TensorHooks, Parametrized, NoGradRegion, Noise, StochasticDepth, PythonCoins),
    *(Autocast, Vmapped, SliceAssign, InplaceResidual, PowersAndReads, LongSkip),
):
    sample(_model)
sample(Siamese, (ROWS, WIDTH), (ROWS, WIDTH))
sample(DictCache, (ROWS, 3, WIDTH))
sample(Selected, (ROWS, WIDTH), (ROWS, WIDTH))


def _keyword_only() -> Example:
    with seeded(0) as generator:
        model = KeywordOnly().double()
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return Example(model, (), {"x": x, "scale": 0.5, "mode": "sin", "other": 3}, torch.zeros(ROWS), mean_square)


SAMPLE["KeywordOnly"] = _keyword_only


def _embedded() -> Example:
    with seeded(0) as generator:
        model = Embedded().double()
        words = torch.randint(0, WORDS, (ROWS, 5), generator=generator)
    return Example(model, (words,), {}, torch.zeros(ROWS), mean_square)


SAMPLE["Embedded"] = _embedded
