"""Find what a user wants planned: ``my_pkg.my_mod:build`` or ``file.py:build``, a callable that returns a model and one batch."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError

__all__ = ["Example", "build_example", "parse_input"]

_FORMS = "model, (model, args), (model, args, kwargs), (model, args, kwargs, loss_fn), or an object or dict with these names"


@dataclass(frozen=True, slots=True)
class Example:
    """A model and one batch of its inputs; ``loss_fn`` is None when the model returns its own loss."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None


def build_example(target: str, inputs: Sequence[str] = ()) -> Example:
    """Import ``target``, call it, and return what it made; ``inputs`` (see :func:`parse_input`) take the place of its batch.

    The current directory can be imported from, and the folder of a file, as with ``python -m`` and ``python file.py``.

    Raises:
        FxChimeraError: It cannot be imported or called, or returns something else; the message names the user's file and line.
    """
    function = _find(target)
    try:
        returned = function()
    except Exception as error:
        raise FxChimeraError(f"{target} raised {type(error).__name__}: {error}{_where(error)}") from error
    example = _example(returned, target)
    if inputs:
        return _with_inputs(example, inputs)
    if not example.args and not example.kwargs:
        raise FxChimeraError(
            f"{target} returned a model without a batch: return (model, args) or (model, args, kwargs), or give the inputs on the "
            'command line, for instance --input "input_ids=int64[16, 128]"'
        )
    return example


def parse_input(text: str) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """Return name ("" for a positional one), dtype and shape of an input written ``name=dtype[sizes]``.

    >>> parse_input("float32[8, 3]"), parse_input("ids=int64[16,128]")
    (('', torch.float32, (8, 3)), ('ids', torch.int64, (16, 128)))

    Raises:
        FxChimeraError: It is written in another way.
    """
    found = re.fullmatch(r"\s*(?:(\w+)\s*=)?\s*(\w+)\s*\[([\d,\s]*)\]\s*", text)
    dtype = getattr(torch, found[2], None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise FxChimeraError(f'an input is written name=dtype[sizes], for instance "input_ids=int64[16, 128]", got {text!r}')
    return found[1] or "", dtype, tuple(int(size) for size in found[3].split(",") if size.strip())


def _find(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise FxChimeraError(f"what to plan is written my_pkg.my_mod:build or file.py:build, got {target!r}")
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            known = sorted(key for key, value in vars(found).items() if callable(value) and not key.startswith("_"))
            raise FxChimeraError(f"{place} has no {name!r}; it has {', '.join(known[:10]) or 'nothing that can be called'}")
        found = getattr(found, part)
    if not callable(found):
        raise FxChimeraError(
            f"{target} is a {type(found).__name__} and cannot be called; it must be a callable that returns {_FORMS}"
        )
    made: Callable[[], Any] = found
    return made


def _module(place: str) -> ModuleType:
    path = Path(place)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise FxChimeraError(f"there is no file {place}")
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _run_file(path) if is_file else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            raise FxChimeraError(f"there is no module {error.name!r}, neither installed nor in {folder}") from error
        raise FxChimeraError(f"{place} needs the module {error.name!r}, which is not installed{_where(error)}") from error
    except Exception as error:
        raise FxChimeraError(f"importing {place} raised {type(error).__name__}: {error}{_where(error)}") from error


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path  # as its name ends in .py
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles in it look themselves up
    spec.loader.exec_module(module)
    return module


def _where(error: BaseException) -> str:
    """The last place outside this file that an error came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if not frame.filename.startswith("<") and "site-packages" not in frame.filename]
    own = [frame for frame in own if Path(frame.filename).parent.name != "importlib"] or frames
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""


def _example(returned: Any, target: str) -> Example:
    if isinstance(returned, nn.Module):
        parts: list[Any] = [returned]
    elif isinstance(returned, (tuple, list)):
        parts = list(returned)
    else:
        names = ("model", "args", "kwargs", "loss_fn")
        table = returned if isinstance(returned, Mapping) else {n: getattr(returned, n) for n in names if hasattr(returned, n)}
        parts = [table.get(name) for name in names]
    if not 1 <= len(parts) <= 4 or not isinstance(parts[0], nn.Module):
        what = (
            f"({', '.join(type(part).__name__ for part in parts)})"
            if isinstance(returned, (tuple, list))
            else type(returned).__name__
        )
        raise FxChimeraError(f"{target} returned {what}; it must return {_FORMS}, with an nn.Module as the model")
    model, args, kwargs, loss_fn = (*parts, None, None, None)[:4]
    if isinstance(args, Mapping) and kwargs is None:
        args, kwargs = (), args
    if isinstance(args, torch.Tensor):
        args = (args,)
    for name, value, kinds in (("args", args, (tuple, list)), ("kwargs", kwargs, Mapping)):
        if value is not None and not isinstance(value, kinds):
            raise FxChimeraError(f"{target} returned {name} of type {type(value).__name__}; args is a tuple, kwargs a dict")
    if loss_fn is not None and not callable(loss_fn):
        raise FxChimeraError(f"{target} returned a loss_fn of type {type(loss_fn).__name__}, which cannot be called")
    return Example(model, tuple(args or ()), dict(kwargs or {}), loss_fn)


def _with_inputs(example: Example, inputs: Sequence[str]) -> Example:
    """The example with ones of the shapes asked for, on the model's device."""
    device = next((p.device for p in example.model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    made = [(name, torch.ones(shape, dtype=dtype, device=device)) for name, dtype, shape in map(parse_input, inputs)]
    args = tuple(tensor for name, tensor in made if not name)
    return Example(example.model, args, {name: tensor for name, tensor in made if name}, example.loss_fn)
