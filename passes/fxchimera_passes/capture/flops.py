"""Analytic cost of one operator: floating-point operations and bytes moved.

torch's own counter has no formula for several operators that real models spend their time in (attention on a CPU, recurrent
layers, grouped matrix products, Fourier transforms); they are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fxchimera_passes._torch import OpOverload, makes_view

__all__ = ["bytes_of", "dear", "each_tensor", "flops_of", "tensors_in"]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an operator's arguments or result (tuples and lists only)."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def each_tensor(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return an operator's argument with ``function`` applied to the tensors in it (tuples and lists only)."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    return kind(each_tensor(function, part) for part in value) if kind in (tuple, list) else value


def flops_of(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of one call (0 for operators that only move data)."""
    own = _OWN.get(operator.overloadpacket.__name__)
    if own is not None:
        return own(args, result)
    formula = flop_registry.get(operator.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def bytes_of(operator: OpOverload, args: tuple[Any, ...], result: Any) -> float:
    """Return the bytes that one call reads and writes; views move nothing."""
    if makes_view(operator):
        return 0.0
    return float(sum(tensor.numel() * tensor.element_size() for tensor in (*tensors_in(args), *tensors_in(result))))


def dear(operator: OpOverload, args: tuple[Any, ...]) -> bool:
    """Tell whether a call does so much arithmetic that its result is better kept than computed again.

    Products, convolutions, attention, recurrent layers and transforms; but not a batched product that is larger than what it is
    made of, as the scores of attention are (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models").
    """
    name = operator.overloadpacket.__name__
    if name not in _OWN and operator.overloadpacket not in flop_registry:
        return False
    if name not in ("bmm", "baddbmm"):
        return True
    left, right = args[-2:]
    return bool(left.shape[-2] * right.shape[-1] <= left.shape[-1] * (left.shape[-2] + right.shape[-1]))


def _attention(args: tuple[Any, ...], result: Any) -> float:
    batch, heads, queries, width = args[0].shape
    keys, values = args[1].shape[-2], args[2].shape[-1]
    return float(2 * batch * heads * queries * keys * (width + values))


def _recurrent(args: tuple[Any, ...], result: Any) -> float:
    steps = args[0].numel() // args[0].shape[-1]
    return float(2 * steps * (args[1].numel() + args[2].numel()))


def _packed_recurrent(args: tuple[Any, ...], result: Any) -> float:
    steps = args[0].numel() // args[0].shape[-1]
    return float(2 * steps * sum(weight.numel() for weight in args[1]))


def _grouped(args: tuple[Any, ...], result: Any) -> float:
    return float(2 * args[0].shape[-1] * result.numel())


def _fourier(args: tuple[Any, ...], result: Any) -> float:
    points = max(args[0].numel(), result.numel())
    length = math.prod(args[0].shape[dim] for dim in args[1])
    return float(5 * points * math.log2(max(length, 2)))


_OWN: Mapping[str, Callable[[tuple[Any, ...], Any], float]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "mkldnn_rnn_layer": _recurrent,
    "_cudnn_rnn": _packed_recurrent,
    "_grouped_mm": _grouped,
    "_fft_c2c": _fourier,
    "_fft_r2c": _fourier,
    "_fft_c2r": _fourier,
}
