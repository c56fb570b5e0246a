"""The loss of a micro-batch, and how much it counts in the loss of the batch.

The mean over a batch is not the mean of its micro-batches' means when they differ in rows or in real tokens, so every
micro-batch gets a weight that is computed from the host batch before anything runs; the weights sum to one.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from fxchimera.errors import BatchError, FxChimeraError
from fxchimera.runtime.microbatch import Batch, MicroBatch
from fxchimera.runtime.stages.program import Program
from fxchimera_passes.structure import flatten

__all__ = [
    "LossFn", "LossWeight", "counts_of", "find_loss", "loss_of", "place_of", "scale_of", "shares_of", "total_loss", "weights_of",
]  # fmt: skip

LossFn = Callable[..., torch.Tensor]
LossWeight = Literal["samples", "sum"] | int | Callable[[Any, tuple[Any, ...], dict[str, Any]], float]

_IGNORE_INDEX = -100


def scale_of(loss_scale: float | torch.Tensor) -> float:
    """Return the number that a step's gradients are multiplied by; a gradient scaler gives it as a tensor.

    Raises:
        FxChimeraError: It is not one finite number.
    """
    value = loss_scale.detach() if isinstance(loss_scale, torch.Tensor) else loss_scale
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise FxChimeraError(f"loss_scale is {type(value).__name__} {found}; pass one number, or a tensor of one") from error
    if not math.isfinite(number):
        raise FxChimeraError(f"loss_scale is {number}, which no gradient can be scaled back from; pass a finite number")
    return number


def loss_of(output: Any, target: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """Return the scalar loss of one micro-batch's output.

    Raises:
        FxChimeraError: The loss is not a scalar tensor, or the model's output holds none.
    """
    if loss_fn is None:
        return find_loss(output)
    loss = loss_fn(output) if target is None else loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}" if isinstance(loss, torch.Tensor) else f"{loss!r}"
        raise FxChimeraError(
            f"loss_fn {place_of(loss_fn)} must return a scalar floating-point tensor, but returned {found}; "
            "reduce it, for instance with .mean()"
        )
    return loss.reshape(())


def find_loss(output: Any) -> torch.Tensor:
    """Find the loss in the output of a model that computes its own: a scalar, a pair with one scalar, ["loss"] or .loss.

    Raises:
        FxChimeraError: No such scalar, or more than one.
    """
    candidates: list[Any]
    if isinstance(output, torch.Tensor):
        candidates = [output]
    elif isinstance(output, Mapping) and "loss" in output:
        candidates = [output["loss"]]
    elif getattr(output, "loss", None) is not None:
        candidates = [output.loss]
    elif isinstance(output, (tuple, list)):
        candidates = [item for item in output if _is_scalar(item)]
    else:
        candidates = []
    losses = [candidate for candidate in candidates if _is_scalar(candidate)]
    if len(losses) != 1:
        shapes = [tuple(tensor.shape) for tensor in flatten(output)[0]]
        raise FxChimeraError(
            f"loss_fn is None, but the model returned {_kind(output)} with tensors of shapes {shapes}, which is not "
            "one scalar loss; pass loss_fn=, or the labels that make the model return its loss"
        )
    loss: torch.Tensor = losses[0]
    return loss.reshape(())


def weights_of(batch: Batch, loss_weight: LossWeight, loss_fn: LossFn | None, programs: Sequence[Program]) -> tuple[float, ...]:
    """Return how much each micro-batch's loss counts; the weights sum to one (except for "sum", where each is one).

    Raises:
        BatchError: See :func:`counts_of` and :func:`shares_of`.
    """
    return shares_of(counts_of(batch, loss_weight, loss_fn, programs), loss_weight, loss_fn)


def shares_of(counts: Sequence[float], loss_weight: LossWeight, loss_fn: LossFn | None) -> tuple[float, ...]:
    """Return the weights of micro-batches of which so much counts.

    Raises:
        BatchError: Nothing in them counts.
    """
    if _recognise(loss_weight, loss_fn) == "sum":
        return tuple(counts)
    total = sum(counts)
    if not 0 < total < float("inf"):
        raise _refusal(counts, loss_weight)
    return tuple(count / total for count in counts)


def counts_of(batch: Batch, loss_weight: LossWeight, loss_fn: LossFn | None, programs: Sequence[Program]) -> tuple[float, ...]:
    """Return how much in each micro-batch counts for its loss; one each for "sum".

    The default, "samples", is refined where the loss can be seen: by what a torch loss says of itself, and by the targets of a
    cross-entropy that the model itself computes (``programs`` are the micro-batches' recordings).

    Raises:
        BatchError: A callable returned a negative or non-finite number.
    """
    resolved = _recognise(loss_weight, loss_fn)
    if resolved == "sum":
        return (1.0,) * len(batch.microbatches)
    own = [program.counted_targets if loss_fn is None and resolved == "samples" else None for program in programs]
    counts = [
        _count(microbatch, resolved) if counted is None else float(counted.count(microbatch.inputs))
        for microbatch, counted in zip(batch.microbatches, own, strict=True)
    ]
    if not all(0 <= count < float("inf") for count in counts):
        raise _refusal(counts, loss_weight)
    return tuple(counts)


def _refusal(counts: Sequence[float], loss_weight: LossWeight) -> BatchError:
    return BatchError(
        f"loss_weight={place_of(loss_weight) if callable(loss_weight) else repr(loss_weight)} gave the micro-batches the weights "
        f"{list(counts)}; they must be finite, not negative, "
        "and at least one must be positive"
    )


def total_loss(
    losses: Mapping[int, torch.Tensor] | Mapping[int, float], weights: tuple[float, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Sum the weighted losses of all micro-batches, ascending, in double precision, and round once to ``dtype``."""
    total = 0.0  # Python's floats have double precision
    for microbatch in sorted(losses):
        if weights[microbatch]:  # a micro-batch without real tokens has a nan mean that must not count
            total += float(losses[microbatch]) * weights[microbatch]
    return torch.tensor(total, dtype=torch.float64, device="cpu").to(dtype)


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def place_of(function: Callable[..., Any]) -> str:
    """Return a function's name, with file and line where it has them."""
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _recognise(loss_weight: LossWeight, loss_fn: LossFn | None) -> LossWeight:
    """Refine the default by what a torch loss says of itself: its reduction, its class weights and its ignore_index."""
    if loss_weight != "samples" or loss_fn is None:
        return loss_weight
    known, options = _options(loss_fn)
    if options.get("reduction") == "sum":
        return "sum"
    if not known:
        return loss_weight
    ignore_index, classes = int(options.get("ignore_index", _IGNORE_INDEX)), options.get("weight")
    if classes is None:
        return ignore_index

    def weight(target: torch.Tensor, _args: Any, _kwargs: Any) -> float:
        """The sum of the class weights of the targets that count, by which torch divides."""
        if target.is_floating_point():
            return float(target.shape[0])
        counted = target[target != ignore_index]
        return float(classes.detach().to("cpu", torch.float64)[counted.to("cpu")].sum())

    return weight


def _options(loss_fn: LossFn) -> tuple[bool, dict[str, Any]]:
    """Whether ``loss_fn`` is torch's cross-entropy (or the negative log likelihood), and how a torch loss was set."""
    if isinstance(loss_fn, functools.partial):
        known, options = _options(loss_fn.func)
        return known, {**options, **loss_fn.keywords}
    options = {name: getattr(loss_fn, name) for name in ("reduction", "ignore_index", "weight") if hasattr(loss_fn, name)}
    known = isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss_fn in (F.cross_entropy, F.nll_loss)
    return known, options


def _count(microbatch: MicroBatch, loss_weight: LossWeight) -> float:
    if callable(loss_weight):
        weight: object = loss_weight(microbatch.target, microbatch.args, microbatch.kwargs)
        if not isinstance(weight, (Real, torch.Tensor)):
            raise BatchError(f"loss_weight {place_of(loss_weight)} must return a number, but returned {weight!r}")
        return float(weight)
    if isinstance(loss_weight, int):
        return _real_targets(microbatch, loss_weight)
    _warn_of_masks(microbatch)
    return float(microbatch.rows)


def _labels(microbatch: MicroBatch) -> list[torch.Tensor]:
    """The targets, or the model's own ``labels=``, where they are class indices."""
    tensors = microbatch.targets if microbatch.targets else flatten(microbatch.kwargs.get("labels"))[0]
    return [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dtype != torch.bool]


def _real_targets(microbatch: MicroBatch, ignore_index: int) -> float:
    labels = _labels(microbatch)
    if not labels:  # class probabilities have no ignored ones
        return float(microbatch.rows)
    return float(sum(int((tensor != ignore_index).sum()) for tensor in labels))


def _warn_of_masks(microbatch: MicroBatch) -> None:
    if any(bool((tensor == _IGNORE_INDEX).any()) for tensor in _labels(microbatch)):
        warnings.warn(
            f"the targets hold {_IGNORE_INDEX}, which torch's losses ignore, but micro-batches are weighted by their rows; "
            f"pass loss_weight={_IGNORE_INDEX} to weight them by the targets that count",
            stacklevel=2,
        )
