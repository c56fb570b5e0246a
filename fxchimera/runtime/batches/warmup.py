"""Recordings paid in advance: what a call would get, without making the call.

    pipe.warmup((x,), {"ids": ids}, ((x,), {"mask": mask}))      three signatures: args, kwargs, both

A recording needs shapes and types, which meta tensors have.  Where the model reads a value into Python, the recording holds for
that value only, and a tensor without values cannot stand for one with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxchimera.errors import BatchError
from fxchimera.runtime.microbatch import Batch, ChunkSpecs, divide
from fxchimera.runtime.stages.program import Program
from fxchimera_passes.captured import Guard
from fxchimera_passes.keyed import microbatch_randomness
from fxchimera_passes.structure import flatten

__all__ = ["WarmupBatch", "arguments_of", "in_mode"]


def arguments_of(signature: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the ``(args, kwargs)`` that a signature means: a tuple of args, a mapping of kwargs, a pair of both, or one tensor.

    Raises:
        BatchError: It is none of these.
    """
    if isinstance(signature, torch.Tensor):
        return (signature,), {}
    if isinstance(signature, Mapping):
        return (), dict(signature)
    if isinstance(signature, (tuple, list)):
        if len(signature) == 2 and isinstance(signature[0], (tuple, list)) and isinstance(signature[1], Mapping):
            return tuple(signature[0]), dict(signature[1])
        return tuple(signature), {}
    raise BatchError(
        "a signature for warmup() is a tuple of positional arguments, a dict of keyword arguments, a pair of both, or one tensor, "
        f"but it is a {type(signature).__name__}"
    )


class WarmupBatch:
    """The batch of one signature; meta tensors are zeros on ``device`` in it."""

    def __init__(self, signature: Any, n_microbatches: int, specs: ChunkSpecs, device: torch.device, *, pipeline: int = 0) -> None:
        tensors, structure = flatten(arguments_of(signature))
        self._given = tensors
        args, kwargs = structure.rebuild([torch.zeros_like(t, device=device) if t.is_meta else t for t in tensors])
        self.batch: Batch = divide(args, kwargs, None, n_microbatches, specs, pipeline=pipeline)

    def check(self, programs: Sequence[Program], seed: int, step: int) -> None:
        """Refuse recordings that hold only for the zeros in the place of meta tensors.

        Raises:
            BatchError: The model reads a value of one; the message has the line.
        """
        absent = [place for place, tensor in enumerate(self._given) if tensor.is_meta]
        if not absent:
            return
        for program, microbatch in zip(programs, self.batch.microbatches, strict=True):
            inputs = [t.to("meta") if place in absent else t for place, t in enumerate(microbatch.inputs)]
            with microbatch_randomness(seed, step, microbatch.number):
                for guard in program.captured.guards:
                    if not _needs_no_values(guard, tuple(inputs)):
                        shapes = ", ".join(str(tuple(self._given[place].shape)) for place in absent)
                        raise BatchError(
                            f"warmup() was given meta tensors (of shapes {shapes}), but {guard.description} at {guard.line} reads "
                            "a value, and the recording holds for that value only; pass tensors with values as in a real batch"
                        )


def _needs_no_values(guard: Guard, inputs: tuple[torch.Tensor, ...]) -> bool:
    try:
        return guard.holds(inputs)
    except Exception:  # torch has many ways to say that a meta tensor has no values
        return False


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode inside; a model that is in training mode keeps the modes of its modules for training."""
    modes = [(module, module.training) for module in model.modules()]
    if training != model.training or not training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
