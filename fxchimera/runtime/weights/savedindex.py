"""The index that makes the files of a save a checkpoint, at one moment, and that says of every bit what it has to be.

It is the index that transformers writes, with a part of ours: the digest of every tensor and of every file's header, all that is no
tensor, and a digest of the index itself.  It may come from anybody, so everything in it is looked at before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.weights.savedfiles import Stored, flush, header_digest

__all__ = ["INDEX", "Saved", "commit", "read_index", "refuse_foreign", "remove_unused"]

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"(?:model|optimizer)-[0-9a-f]{12}-rank\d{5}-\d{5}\.safetensors")
_VALUES = {"step": int, "seed": int, "extra": dict, "states": dict, "scalars": dict, "options": dict}


@dataclass(frozen=True, slots=True)
class Saved:
    """What an index says: the model's tensors and the optimizer's by name, and all that is no tensor."""

    model: Mapping[str, Stored]
    optimizer: Mapping[str, Stored]
    values: Mapping[str, Any]

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files."""
        return tuple(dict.fromkeys(stored.file for stored in (*self.model.values(), *self.optimizer.values())))


def commit(folder: Path, saved: Saved) -> None:
    """Make what was written the folder's checkpoint, at one moment.

    Raises:
        OSError: The index cannot be written.
        FxChimeraError: A file is not there: the ranks do not write to one and the same folder.
    """
    absent = sorted(name for name in saved.files if not (folder / name).is_file())
    if absent:
        raise FxChimeraError(
            f"{len(absent)} files that other ranks have written are not in rank 0's {folder} ({absent[0]}); the folder has to be "
            "on a file system that all ranks share"
        )
    rest = {
        "optimizer": {name: asdict(stored) for name, stored in saved.optimizer.items()},
        "digests": {name: stored.digest for name, stored in saved.model.items()},
        "headers": {name: header_digest(folder / name) for name in saved.files},
        "values": saved.values,
    }
    index = {"metadata": {"format": "pt"}, "weight_map": {name: s.file for name, s in saved.model.items()}, "fxchimera": rest}
    index = json.loads(json.dumps(index))  # as it will be read: keys that are numbers become text, and sort as text
    path = folder / f"{INDEX}.tmp"
    path.write_text(_text({**index, "digest": _digest_of_index(index)}), encoding="utf-8")
    flush(path)
    os.replace(path, folder / INDEX)
    flush(folder)


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
        used = {*_saved(json.loads((folder / INDEX).read_text(encoding="utf-8"))).files}
    except FileNotFoundError:
        used = set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    for path in folder.glob("*.safetensors"):
        if _OURS.fullmatch(path.name) and path.name not in used:
            with suppress(OSError):
                path.unlink()


def read_index(folder: Path) -> Saved:
    """Read what the last complete save wrote, and compare the headers of its files.

    Raises:
        FxChimeraError: There is none, it was not written by ``pipe.save``, or it is damaged.
    """
    path = folder / INDEX
    try:
        text = path.read_text(encoding="utf-8")
        index = json.loads(text)
    except FileNotFoundError:
        raise FxChimeraError(f"{folder} holds no checkpoint: there is no {INDEX}; name a folder that pipe.save was given") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FxChimeraError(
            f"the index {path} cannot be read ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    if not isinstance(index, dict) or "fxchimera" not in index:
        raise FxChimeraError(f"{path} was not written by pipe.save; for its weights alone use fxchimera.pipeline(..., checkpoint=)")
    same = text == _text(index)  # else a bit may have gone that JSON does not care about, as in 1e-05 and 1E-05
    if index.pop("digest", None) != _digest_of_index(index) or not same:
        raise FxChimeraError(f"the index {path} is damaged: its content does not match its digest; use another checkpoint")
    try:
        saved = _saved(index)
        _check(saved, index["fxchimera"]["headers"], folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise FxChimeraError(f"the index {path} is not as pipe.save writes it ({type(error).__name__}: {error})") from error
    return saved


def _saved(index: Mapping[str, Any]) -> Saved:
    rest = index["fxchimera"]
    model = {name: Stored(file, rest["digests"][name]) for name, file in index["weight_map"].items()}
    return Saved(model, {name: Stored(**stored) for name, stored in rest["optimizer"].items()}, rest["values"])


def _check(saved: Saved, headers: Mapping[str, str], folder: Path) -> None:
    """Refuse values of other types than ours, files elsewhere, and headers that are not those that were saved."""
    for key, kind in _VALUES.items():
        if not isinstance(saved.values[key], kind):
            raise TypeError(f"{key} is a {type(saved.values[key]).__name__}, not a {kind.__name__}")
    for name in saved.files:
        if not isinstance(name, str) or not _OURS.fullmatch(name):
            raise FxChimeraError(f"the index in {folder} names a file {name!r}, which pipe.save does not write")
        try:
            found = header_digest(folder / name)
        except OSError as error:
            raise FxChimeraError(f"{folder} is damaged: {name} cannot be read ({error}); use another checkpoint") from error
        if found != headers[name]:
            raise FxChimeraError(
                f"{folder} is damaged: the size or the header of {name} is not what was saved; use another checkpoint"
            )


def _text(index: Mapping[str, Any]) -> str:
    return json.dumps(index, indent=1)


def _digest_of_index(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
