"""The operators whose weight gradient can be put off, and how their operands are told apart.

Only operators that use each operand once in autograd's graph are listed: then an input's gradient is one summand, as without
deferral, and sums associate the same way.  RMS norm on a CPU is made of several operators that all read its input: it is not here.
Neither are layer and group norm, whose weights are small: putting them off gave the same bits and moved no time out of I, but it
cost 1 to 2 % of the backward of a transformer layer and 3 to 6 % of that of convolutions with group norm, and kept 25 % and 100 %
more memory until W (benchmarks/split.py on one core of a CPU).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from fxchimera.runtime.stages.again import ours
from fxchimera_passes import _torch

__all__ = ["COMPOSITE", "Operands", "OperatorMode", "deferrable", "opened", "operands", "parameters_behind", "splittable"]

_OPERATORS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear, F.bilinear, F.embedding, torch.embedding, F.embedding_bag, torch.einsum, torch.tensordot,
        torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
        torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, _torch.grouped_mm,
        Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm,
    }
)  # fmt: skip

_MOST_NODES = 32  # of the graph between a parameter and the weight that is made of it

COMPOSITE: Callable[..., Any] = F.multi_head_attention_forward
"""A Python function that a function mode sees from outside only."""


def _never(*_args: object) -> bool:
    return False


def _rebound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a Python function of torch so that it runs its own body even when a function mode is active."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "has_torch_function": _never}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


opened: Callable[..., Any] = _rebound(F.multi_head_attention_forward)
"""``COMPOSITE`` with its body in the open: the projections inside are seen one by one."""


class OperatorMode(TorchFunctionMode):
    """A function mode that sees operators one by one, those inside ``COMPOSITE`` too; a subclass overrides :meth:`call`."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is COMPOSITE and not self._inside:
            self._inside = True
            try:
                with self:
                    return opened(*args, **kwargs)
            finally:
                self._inside = False
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator."""
        return func(*args, **kwargs)


class Operands:
    """The operands of one call: trainable ``parameters``, and the ``inputs`` that gradients flow to.

    ``made`` are weights that were computed from parameters alone (normalised, transposed, one expert's of a stack); the parameters
    behind them are among ``parameters``.
    """

    __slots__ = ("inputs", "made", "parameters")

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.inputs: list[Tensor] = []
        self.made: list[Tensor] = []

    @property
    def weighted(self) -> bool:
        """Whether there is a weight among the parameters, and not for instance a bias alone."""
        return any(parameter.dim() > 1 for parameter in self.parameters)

    def look_behind(self, opaque: Callable[[Any], bool]) -> None:
        """Tell the weights that were made of parameters from the inputs."""
        for tensor in self.inputs:
            behind = parameters_behind(tensor, opaque)
            if behind:
                self.made.append(tensor)
                self.parameters += behind
        if self.made:
            self.inputs = [tensor for tensor in self.inputs if all(tensor is not one for one in self.made)]

    def take(self, value: Any) -> bool:
        """Sort one argument in; False when it is of a kind that rules deferral out."""
        kind = type(value)
        if kind is nn.Parameter:
            if value.requires_grad:
                self.parameters.append(value)
            return True
        if kind is Tensor:
            if value.requires_grad:
                self.inputs.append(value)
            return True
        if kind is list or kind is tuple:
            return all(self.take(one) for one in value)
        return not isinstance(value, Tensor)


def operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
    """Return the operands of a call, None when a tensor of an unknown class is among them."""
    found = Operands()
    for value in args:
        if not found.take(value):
            return None
    for value in kwargs.values():
        if not found.take(value):
            return None
    return found


def parameters_behind(tensor: Tensor, opaque: Callable[[Any], bool]) -> list[nn.Parameter]:
    """Return the parameters that a tensor was computed from; none if from anything else too, or by many operations.

    ``opaque`` are nodes of the graph whose results do not count as made of parameters.
    """
    found: dict[int, nn.Parameter] = {}
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and type(leaf) is nn.Parameter:
            found[id(leaf)] = leaf
        elif leaf is not None or len(seen) > _MOST_NODES or opaque(node):
            return []
        waiting += [following for following, _ in node.next_functions]
    return list(found.values())


def splittable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function, of tensors to one tensor, an operator whose weight gradients can be put off.

    For kernels of your own: inside it autograd must get the gradients of the inputs and those of the parameters from different
    nodes, or either part would compute both; and each input must be used once.
    """

    @functools.wraps(function)
    def operator(*args: Any, **kwargs: Any) -> Tensor:
        tensors = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if has_torch_function(tensors):
            seen: Tensor = handle_torch_function(operator, tensors, *args, **kwargs)
            return seen
        return function(*args, **kwargs)

    operator.splittable = True  # type: ignore[attr-defined]
    return operator


def deferrable(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], opaque: Callable[[Any], bool]
) -> Operands | None:
    """Return the operands of a call whose weight gradient can be put off, else None.

    ``opaque`` tells the nodes of deferrable calls: see :func:`parameters_behind`.  Not for the sake of a bias alone, not under a
    saved-tensor hook (checkpointing would recompute twice) nor in a ``torch.func`` transform, not with ``out=``, and not an
    embedding that makes sparse gradients or renormalises its weights.
    """
    if not torch.is_grad_enabled() or (function not in _OPERATORS and not getattr(function, "splittable", False)):
        return None
    found = operands(args, kwargs)
    if found is None or kwargs.get("out") is not None:
        return None
    if not found.weighted:
        found.look_behind(opaque)
        if not found.weighted:
            return None
    hook = _torch.saved_tensor_hook()
    if (hook is not None and not ours(hook)) or _torch.in_transform():
        return None
    if function is F.embedding_bag and (_argument(args, kwargs, 7, "sparse") or _argument(args, kwargs, 3, "max_norm") is not None):
        return None
    if function is F.embedding and (_argument(args, kwargs, 6, "sparse") or _argument(args, kwargs, 3, "max_norm") is not None):
        return None
    if function is torch.embedding and _argument(args, kwargs, 4, "sparse"):
        return None
    return found


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)
