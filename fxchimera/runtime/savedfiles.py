"""The files of a saved pipeline: safetensors written by every rank, and one index that makes them a checkpoint.

    model-<token>-rank00002-00000.safetensors      what a rank owns, a gigabyte a file; a new token in every save
    model.safetensors.index.json                   replaced last: names the files of one save, and the digest of every tensor

A process may be killed at any moment, so no file of an earlier save is touched before the new index is in place, which one atomic
rename does.  The index is also the one that transformers writes, so the folder is an ordinary sharded checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.weightfiles import Files

__all__ = [
    "INDEX",
    "Saved",
    "Stored",
    "commit",
    "damaged",
    "digest_of",
    "files_of",
    "read_index",
    "refuse_foreign",
    "remove_unused",
    "write_tensors",
]

INDEX = "model.safetensors.index.json"
_FILE_BYTES = 1 << 30
_OURS = re.compile(r"(?:model|optimizer)-[0-9a-f]{12}-rank\d{5}-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is: the file, and the SHA-256 of shape, dtype and values."""

    file: str
    digest: str


@dataclass(frozen=True, slots=True)
class Saved:
    """What an index says: the model's tensors and the optimizer's by name, and all that is no tensor."""

    model: Mapping[str, Stored]
    optimizer: Mapping[str, Stored]
    values: Mapping[str, Any]


def files_of(folder: Path, stored: Mapping[str, Stored]) -> Files:
    """Return the tensors of a saved model, or of a saved optimizer, to read from."""
    return Files(str(folder), {name: folder / one.file for name, one in stored.items()})


def digest_of(tensor: torch.Tensor) -> str:
    """The SHA-256 of a CPU tensor's dtype, shape and values."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def write_tensors(folder: Path, kind: str, token: str, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """Write tensors into files of about a gigabyte, and on to the disk; they belong to no checkpoint yet.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    stored: dict[str, Stored] = {}
    for number, part in enumerate(_parts(tensors)):
        name = f"{kind}-{token}-rank{rank:05d}-{number:05d}.safetensors"
        values = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in part.items()}
        save_file(values, folder / name, metadata={"format": "pt"})
        _flush(folder / name)
        stored |= {key: Stored(name, digest_of(value)) for key, value in values.items()}
    return stored


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > _FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def commit(folder: Path, saved: Saved) -> None:
    """Make what was written the folder's checkpoint, at one moment.

    Raises:
        OSError: The index cannot be written.
        FxChimeraError: A file is not there: the ranks do not write to one and the same folder.
    """
    files = {stored.file for stored in (*saved.model.values(), *saved.optimizer.values())}
    absent = sorted(name for name in files if not (folder / name).is_file())
    if absent:
        raise FxChimeraError(
            f"{len(absent)} files that other ranks have written are not in rank 0's {folder} ({absent[0]}); the folder has to be "
            "on a file system that all ranks share"
        )
    rest = {
        "optimizer": {name: asdict(stored) for name, stored in saved.optimizer.items()},
        "digests": {name: stored.digest for name, stored in saved.model.items()},
        "values": saved.values,
    }
    index = {"metadata": {"format": "pt"}, "weight_map": {name: s.file for name, s in saved.model.items()}, "fxchimera": rest}
    path = folder / f"{INDEX}.tmp"
    path.write_text(json.dumps({**index, "digest": _digest_of_index(index)}, indent=1), encoding="utf-8")
    _flush(path)
    os.replace(path, folder / INDEX)
    _flush(folder)


def refuse_foreign(folder: Path) -> None:
    """Do not write over the index of a checkpoint that something else has written.

    Raises:
        FxChimeraError: There is one.
    """
    with suppress(FileNotFoundError, ValueError):
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if "fxchimera" not in index:
            raise FxChimeraError(f"{folder} holds a checkpoint that pipe.save has not written; save into another folder")


def remove_unused(folder: Path) -> None:
    """Remove the files of saves that the index does not name; what cannot be removed stays for the next time.

    Only rank 0 may: another rank does not know whether rank 0 has committed.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        used = {*index["weight_map"].values(), *(stored["file"] for stored in index["fxchimera"]["optimizer"].values())}
    except FileNotFoundError:
        used = set()
    except (OSError, ValueError, KeyError):
        return
    for path in folder.glob("*.safetensors"):
        if _OURS.fullmatch(path.name) and path.name not in used:
            with suppress(OSError):
                path.unlink()


def read_index(folder: Path) -> Saved:
    """Read what the last complete save wrote.

    Raises:
        FxChimeraError: There is none, it was not written by ``pipe.save``, or it is damaged.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FxChimeraError(f"{folder} holds no checkpoint: there is no {INDEX}") from None
    except (OSError, ValueError) as error:
        raise FxChimeraError(f"the index {path} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(index, dict) or "fxchimera" not in index:
        raise FxChimeraError(f"{path} was not written by pipe.save; for its weights alone use fxchimera.pipeline(..., checkpoint=)")
    digest = index.pop("digest", None)
    if digest != _digest_of_index(index):
        raise FxChimeraError(f"the index {path} is damaged: its content does not match its digest")
    rest = index["fxchimera"]
    model = {name: Stored(file, rest["digests"][name]) for name, file in index["weight_map"].items()}
    return Saved(model, {name: Stored(**stored) for name, stored in rest["optimizer"].items()}, rest["values"])


def _digest_of_index(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damaged(files: Files, stored: Mapping[str, Stored], names: Iterable[str]) -> list[str]:
    """Return the names whose values are not those that were saved; all of them are read."""
    return [name for name in names if (value := files.read(name)) is None or digest_of(value) != stored[name].digest]
