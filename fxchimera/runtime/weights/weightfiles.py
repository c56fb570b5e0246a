"""Where weights come from: a checkpoint on disk, a mapping, or a function, read one tensor at a time.

A checkpoint may be larger than a host, so only what is asked for is read.  Files are mapped, not read, and a mapping is given up
after some megabytes: its pages count as this process's memory until then.  Nothing of a file is ever run as code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from fxchimera.errors import FxChimeraError

__all__ = ["Checkpoint", "Files", "WeightSource", "open_weights"]

Checkpoint: TypeAlias = str | os.PathLike[str] | Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor | None]

_HELD_BYTES = 16 << 20
_TORCH_ENDINGS = (".bin", ".pt", ".pth")


class WeightSource(Protocol):
    """Tensors by qualified name; ``text`` is what errors call it, ``names`` None where only asking tells."""

    text: str
    names: frozenset[str] | None

    def read(self, name: str) -> torch.Tensor | None:
        """Return a tensor, good until the next read; None if there is none of this name."""


class _Given:
    """A mapping or a function of the user's."""

    def __init__(self, given: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor | None]) -> None:
        self.names = frozenset(given) if isinstance(given, Mapping) else None
        self.text = "the mapping" if isinstance(given, Mapping) else "the function"
        self._get = given.get if isinstance(given, Mapping) else given

    def read(self, name: str) -> torch.Tensor | None:
        """Ask the user's object."""
        found: Any = self._get(name)
        if found is not None and not isinstance(found, torch.Tensor):
            raise FxChimeraError(f"checkpoint: {self.text} gives a {type(found).__name__} for {name!r}, not a tensor")
        return found


class Files:
    """Files of one checkpoint; ``places`` tells which file holds a tensor."""

    def __init__(self, text: str, places: Mapping[str, Path]) -> None:
        self.text = text
        self.names: frozenset[str] | None = frozenset(places)
        self._places = places
        self._open: tuple[Path, _Opened] | None = None
        self._held = 0

    def read(self, name: str) -> torch.Tensor | None:
        """Read from the file that holds the tensor; it stays open for what follows."""
        path = self._places.get(name)
        if path is None:
            return None
        if self._open is None or self._open[0] != path or self._held > _HELD_BYTES:
            self._open, self._held = None, 0  # first, so that two mappings never exist
            self._open = path, _opened(path)
        try:
            found = self._open[1].get(name)
        except (KeyError, SafetensorError) as error:
            raise FxChimeraError(f"checkpoint: {path} does not hold {name!r}, as its index says: {error}") from error
        self._held += found.nbytes
        return found


class _Opened(Protocol):
    """A file of tensors."""

    def names(self) -> Iterable[str]: ...

    def get(self, name: str) -> torch.Tensor: ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self._file = safe_open(str(path), framework="pt", device="cpu")

    def names(self) -> Iterable[str]:
        names: list[str] = self._file.keys()  # type: ignore[no-untyped-call]
        return names

    def get(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        return found


class _Torch:
    def __init__(self, path: Path) -> None:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        others = [key for key, value in loaded.items() if not isinstance(value, torch.Tensor)] if isinstance(loaded, dict) else []
        if not isinstance(loaded, dict) or others:
            found = f"a dict with {others[:3]}" if others else f"a {type(loaded).__name__}"
            raise FxChimeraError(
                f"checkpoint: {path} holds {found}, not tensors by name; pass the state dict inside it: "
                f'checkpoint=torch.load(path, mmap=True, weights_only=True)["<key>"]'
            )
        self._tensors: dict[str, torch.Tensor] = loaded

    def names(self) -> Iterable[str]:
        return self._tensors

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """Find out what a checkpoint holds; no tensor is read.

    Args:
        checkpoint: A file (.safetensors, or .bin, .pt, .pth as ``torch.save`` writes a state dict), a folder with one such file or
            with several and the index of them that transformers writes (``model.safetensors.index.json``), a mapping from
            qualified names to tensors, or a function of a qualified name that may return None.

    Raises:
        FxChimeraError: There is no such file, or it cannot be read as a checkpoint.
    """
    if not isinstance(checkpoint, (str, os.PathLike)):
        return _Given(checkpoint)
    path = Path(checkpoint)
    if path.is_dir():
        path = _only_file(path)
    if path.suffix == ".json":
        return Files(str(path), _indexed(path))
    return Files(str(path), dict.fromkeys(_opened(path).names(), path))


def _only_file(folder: Path) -> Path:
    """The index of a folder, or its one file of weights."""
    for pattern in (["*.safetensors.index.json"], ["*.index.json"], ["*.safetensors"], [f"*{end}" for end in _TORCH_ENDINGS]):
        found = sorted(path for one in pattern for path in folder.glob(one))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:4])
            raise FxChimeraError(f"checkpoint: {folder} holds {len(found)} candidates ({names}); name the file, or its index")
    if (folder / ".metadata").exists():
        raise FxChimeraError(
            f"checkpoint: {folder} is one of torch.distributed.checkpoint, whose metadata is a pickle; turn it into a file with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save if you trust it"
        )
    raise FxChimeraError(f"checkpoint: {folder} holds no .safetensors, {', '.join(_TORCH_ENDINGS)} and no index of such files")


def _indexed(path: Path) -> dict[str, Path]:
    """Which file beside the index holds which tensor."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: path.parent / Path(file).name for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FxChimeraError(f"checkpoint: the index {path} cannot be read ({type(error).__name__}: {error})") from error
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise FxChimeraError(f"checkpoint: the index {path} names {len(absent)} files that are not there: {', '.join(absent[:4])}")
    return files


def _opened(path: Path) -> _Opened:
    try:
        if path.suffix == ".safetensors":
            return _Safetensors(path)
        if path.suffix in _TORCH_ENDINGS:
            return _Torch(path)
    except FxChimeraError:
        raise
    except Exception as error:  # whatever a broken or foreign file makes of the reader
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise FxChimeraError(
            f"checkpoint: {path} cannot be read ({said}); save it as safetensors, or load it yourself, if you trust it, and pass "
            "what you have loaded"
        ) from error
    kinds = ", ".join((".safetensors", *_TORCH_ENDINGS, ".json"))
    raise FxChimeraError(f"checkpoint: {path} must end in one of {kinds}, or be a folder with such files")
