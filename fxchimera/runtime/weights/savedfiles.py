"""The files of a saved pipeline: safetensors written by every rank, and one index that makes them a checkpoint.

    model-<token>-rank00002-00000.safetensors      what a rank owns, a gigabyte a file; a new token in every save
    model.safetensors.index.json                   replaced last: names the files of one save, and the digest of every tensor

A process may be killed at any moment, so no file of an earlier save is touched before the new index is in place, which one atomic
rename does.  The index is also the one that transformers writes, so the folder is an ordinary sharded checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fxchimera.runtime.sharded import whole
from fxchimera.runtime.weights.weightfiles import Files

__all__ = ["Stored", "damaged", "digest_of", "files_of", "flush", "header_digest", "write_tensors"]

_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is: the file, and the SHA-256 of shape, dtype and values."""

    file: str
    digest: str


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


def write_tensors(folder: Path | None, kind: str, token: str, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """Write tensors into files of about a gigabyte, and on to the disk; they belong to no checkpoint yet.

    Of a sharded tensor all is written; the ranks that share it call this together, and those without a ``folder`` only take part
    in bringing it together, one tensor at a time.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    stored: dict[str, Stored] = {}
    problem: OSError | None = None
    for number, part in enumerate(_parts(tensors)):
        name = f"{kind}-{token}-rank{rank:05d}-{number:05d}.safetensors"
        values: dict[str, torch.Tensor] = {}
        for key, tensor in part.items():
            everything = whole(tensor.detach())
            if folder is not None and problem is None:
                values[key] = everything.to("cpu", copy=True).contiguous()
        if not values:
            continue
        assert folder is not None
        try:
            save_file(values, folder / name, metadata={"format": "pt"})
            flush(folder / name)
        except (OSError, SafetensorError) as error:  # the others count on this rank for the tensors that follow
            problem = error if isinstance(error, OSError) else OSError(str(error))
        stored |= {key: Stored(name, digest_of(value)) for key, value in values.items()}
    if problem is not None:
        raise problem
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


def header_digest(path: Path) -> str:
    """The SHA-256 of what is in a file beside tensors: its size, and the header with names, shapes and places.

    Raises:
        OSError: There is no such file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), size))
    return hashlib.sha256(b"%d " % size + length + header).hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damaged(files: Files, stored: Mapping[str, Stored], names: Iterable[str]) -> list[str]:
    """Return the names whose values are not those that were saved; all of them are read."""
    return [name for name in names if (value := files.read(name)) is None or digest_of(value) != stored[name].digest]
