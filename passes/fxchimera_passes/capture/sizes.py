"""An operator whose result has a size that hangs on values: ``h[labels != -100]``, ``mask.nonzero()``, a packed sequence.

A fake tensor cannot have a size that is not known.  Where the inputs alone decide it, the operator runs once on their real values,
with stand-ins for everything that depends on parameters, and the recording is guarded by the sizes found.  Two fillings of the
stand-ins must agree: a size that hangs on a parameter is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxchimera_passes._torch import real_values
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.captured import info
from fxchimera_passes.structure import flatten

if TYPE_CHECKING:
    from fxchimera_passes.capture.recorder import Recorder

__all__ = ["sized_by_inputs"]

_FILLINGS = (0, 1)


class _Sizes:
    """Calls ``function`` and returns the shapes of the tensors in its result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(tensor.shape) for tensor in flatten(self.function(*args, **kwargs))[0])


def sized_by_inputs(recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``function`` with fake tensors in it, guarded by their sizes; None where not the inputs decide them."""
    writer, reads = recorder.writer, recorder.reads
    if any(tensor.is_meta for tensor in reads.real_inputs):
        return None
    arguments = writer.convert(args), writer.convert(dict(kwargs))
    hidden: dict[fx.Node, None] = {}
    fx.map_arg(arguments, lambda node: hidden.setdefault(node) if info(node).depends - {"input"} else None)
    if any(info(node).value is None for node in hidden):
        return None
    replays = [reads.replay(_Sizes(function), arguments, dict.fromkeys(hidden, filling)) for filling in _FILLINGS]
    results = [reads.replay(function, arguments, dict.fromkeys(hidden, filling)) for filling in _FILLINGS[:1]]
    try:
        with real_values():
            sizes = [replay.value(reads.real_inputs) for replay in replays]
            result = results[0].value(reads.real_inputs)
    except (RuntimeError, IndexError, ValueError):
        return None
    if sizes[0] != sizes[1]:
        return None
    reads.guard(f"sizes of the result of {getattr(function, '__name__', 'a function')}() at {user_line()}", replays[0])
    tensors, structure = flatten(result)
    needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flatten((args, dict(kwargs)))[0])
    return structure.rebuild([_fake(recorder, tensor, needs) for tensor in tensors])


def _fake(recorder: Recorder, tensor: Tensor, needs: bool) -> Tensor:
    with recorder.mode, recorder.pause():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=recorder.device)
        if needs and (tensor.is_floating_point() or tensor.is_complex()):
            return fake.requires_grad_().view_as(fake)  # not a leaf, as in the forward
        return fake
