"""The underscored parts of torch that the passes need, behind our own names; tried on torch 2.13.

Nothing public tells which storage a fake tensor lives in, what an operator writes, or switches the modes off around a real
computation, and the recorder needs all three.  Every such use is in this file, so that another torch version is tried here first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks  # type: ignore[attr-defined,unused-ignore]
from torch._C._functorch import peek_interpreter_stack  # type: ignore[attr-defined,unused-ignore]
from torch._functorch import apis as functorch_apis
from torch._functorch import config as functorch_config
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

__all__ = [
    "VALUE_NEEDED",
    "CheckpointFunction",
    "FakeTensor",
    "FakeTensorMode",
    "MemoryRef",
    "OpOverload",
    "TorchDispatchMode",
    "apply_function",
    "call_uncompiled",
    "compile_alike",
    "compiled",
    "compiling_whole",
    "grouped_mm",
    "hooks_of",
    "in_transform",
    "is_view",
    "makes_view",
    "memory_is_shared",
    "new_fake_mode",
    "operator_name",
    "override_tables",
    "profiling",
    "quiet",
    "real_values",
    "record_ranges",
    "run_backward",
    "saved_tensor_hook",
    "storage_key",
    "tensor_tables",
    "uncompiled",
    "version",
    "vmap_run",
    "without",
    "written",
]

VALUE_NEEDED: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What a fake tensor raises when an operator needs the values that it does not have."""

grouped_mm: Callable[..., Tensor] = torch._grouped_mm
"""The operator that function modes see inside ``F.grouped_mm``, which is a Python function that they do not see."""


def new_fake_mode() -> FakeTensorMode:
    """Make a mode in which tensors have no values and constants of the model may stay real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int | None:
    """Identify the memory that ``tensor`` looks at (equal for a tensor and its views), None for tensors without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def memory_is_shared(tensor: Tensor, views: int = 0) -> bool:
    """Whether anything beside so many ``views``, be it a tensor that only autograd holds, looks at the memory of ``tensor``."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2 + views  # ``tensor`` and ``storage``


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, outside of ``torch.func``'s transforms: for these the public method looks at every argument."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def run_backward(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
    *,
    keep_graph: bool = False,
    add: bool = True,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.backward``, or with ``add=False`` ``torch.autograd.grad``, for roots whose gradients are given.

    The public functions look at every root in Python first, with code for symbolic shapes, which takes half as long as the
    backward of a small stage; the engine checks the shapes again.
    """
    found: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=add
    )
    return found


class MemoryRef:
    """Remembers the memory of a tensor without keeping it; while it does, :func:`storage_key` gives its key to no other memory."""

    __slots__ = ("_reference",)

    def __init__(self, tensor: Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    @property
    def gone(self) -> bool:
        """Whether the memory has been freed."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]


def version(tensor: Tensor) -> int:
    """Count the in-place writes that ``tensor`` has seen."""
    return 0 if tensor.is_inference() else int(tensor._version)


def operator_name(operator: OpOverload) -> str:
    """Return the name of an operator without its overload, as "aten::add"."""
    return str(operator._schema.name)


def is_view(tensor: Tensor) -> bool:
    """Tell whether autograd takes ``tensor`` for a view of another one."""
    return bool(tensor._is_view())


def makes_view(operator: OpOverload) -> bool:
    """Tell whether ``operator`` only looks at its argument's memory in another way."""
    return bool(operator.is_view)


def written(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that ``operator`` writes when called so.

    Batch norm writes its running statistics without saying so in its schema.
    """
    if not operator._schema.is_mutable and "batch_norm" not in operator._schema.name:
        return []
    values = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | dict(kwargs)
    names = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    trains = values.get("training", values.get("train", True))
    if "running_mean" in values and trains and not operator._schema.name.endswith("backward"):
        names += ["running_mean", "running_var"]
    found: list[Tensor] = []
    for name in names:
        value = values.get(name)
        found += [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor)]
    return found


def in_transform() -> bool:
    """Tell whether a ``torch.func`` transform (vmap, grad, ...) is running."""
    return peek_interpreter_stack() is not None


def vmap_run(function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return what functions made by ``torch.vmap`` call to run; with ``function``, let them call that."""
    if function is not None:
        functorch_apis.vmap_impl = function  # type: ignore[attr-defined,assignment,unused-ignore]
    found: Callable[..., Any] = functorch_apis.vmap_impl  # type: ignore[attr-defined,unused-ignore]
    return found


def real_values() -> AbstractContextManager[Any]:
    """Switch every dispatch mode off, so that real tensors are computed on."""
    return _disable_current_modes()


def without(mode: TorchFunctionMode) -> AbstractContextManager[Any]:
    """Take ``mode`` off the stack of function modes for a while; does nothing unless it is on top."""
    if _get_current_function_mode() is mode:  # type: ignore[no-untyped-call]
        return _pop_mode_temporarily()
    return nullcontext()


def profiling() -> bool:
    """Whether torch's profiler is on anywhere in this process (it may record all threads, which a thread cannot see)."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def record_ranges(on: bool) -> None:
    """Let torch's profiler see what this thread does from now on, as it does by default, or not."""
    torch.autograd._enable_record_function(on)  # type: ignore[attr-defined,unused-ignore]


def saved_tensor_hook() -> Any:
    """Return the function through which autograd saves tensors now (checkpointing, offloading), None without one."""
    hooks = _top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks else None


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the module's own tables of parameters and of buffers; writing to them replaces the tensor."""
    return module._parameters, module._buffers


@contextmanager
def override_tables(module: nn.Module, replacement: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put ``replacement(t)`` in the place of every own parameter and buffer ``t`` of ``module``.

    Recurrent layers keep a second list of their weights, which follows.
    """
    tables = tensor_tables(module)
    kept = [dict(table) for table in tables]
    weights = module._flat_weights if isinstance(module, nn.RNNBase) else None
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = replacement(tensor)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = weights  # type: ignore[assignment,unused-ignore]


def hooks_of(module: nn.Module) -> tuple[list[Callable[..., Any]], bool]:
    """Return the forward hooks of ``module`` and whether it has backward hooks."""
    forward = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return forward, bool(module._backward_hooks or module._backward_pre_hooks)


def compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` or ``module.compile()`` was used on this very module."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def compile_alike(module: nn.Module, clone: nn.Module) -> None:
    """Compile a copy as ``module.compile()`` was called, which copying leaves out; it stays as it is where that cannot be told."""
    call = module._compiled_call_impl
    if call is None or clone._compiled_call_impl is not None:
        return
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    if callable(again := cells["self"].cell_contents if "self" in cells else None):
        clone._compiled_call_impl = again(clone._call_impl)


def compiling_whole() -> AbstractContextManager[Any]:
    """Compile the backward together with the forward, not when it first runs."""
    return functorch_config.patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return,unused-ignore]


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions and modules eagerly; does not load the compiler when nobody has."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of operators that fail on fake tensors: the recorder tries them again on real ones."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def call_uncompiled(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``module`` with its hooks, but not the compiled form that ``module.compile()`` made."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
