"""Files made to harm whoever loads them, or broken ones: none may run code, and every one is refused with our error."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fxchimera.runtime.weights.savedindex import INDEX, _digest_of_index, _text

__all__ = ["Trap", "hostile_folders"]

_OPERATORS = ("os.system", "builtins.eval", "builtins.exec", "subprocess.call", "posix.system")


class Trap:
    """Unpickled, it makes the file ``mark``, by one of several callables."""

    def __init__(self, mark: Path, number: int) -> None:
        self.mark, self.number = mark, number

    def __reduce__(self) -> Any:
        module, name = _OPERATORS[self.number % len(_OPERATORS)].split(".")
        call = getattr(__import__(module), name)
        text = f"touch {self.mark}" if name in ("system", "call") else f"__import__('pathlib').Path({str(self.mark)!r}).touch()"
        return (call, ([*text.split()],)) if name == "call" else (call, (text,))


def hostile_folders(folder: Path, mark: Path, good: Path, count: int) -> Iterator[Path]:
    """Make ``count`` folders that look like checkpoints; ``good`` is one that ``pipe.save`` has written."""
    makers = (_pickle, _zip, _named_safetensors, _metadata, _header, _index, _forged, _noise)
    for number in range(count):
        place = folder / f"case{number}"
        place.mkdir(parents=True)
        makers[number % len(makers)](place, mark, good, number // len(makers))
        yield place


def _pickle(place: Path, mark: Path, good: Path, number: int) -> None:
    """A bare pickle under the names that torch's files have."""
    name = ("model.bin", "model.pt", "model.pth")[number % 3]
    content: Any = [Trap(mark, number), {"weight": Trap(mark, number)}, {Trap(mark, number): 1}][number % 3]
    (place / name).write_bytes(pickle.dumps(content, protocol=number % 5))


def _zip(place: Path, mark: Path, good: Path, number: int) -> None:
    """What torch.save writes, with a trap beside the tensors."""
    torch.save({"0.weight": torch.ones(2, 2), "trap": Trap(mark, number)}, place / ("model.pt", "model.bin")[number % 2])


def _named_safetensors(place: Path, mark: Path, good: Path, number: int) -> None:
    """A pickle, or a zip with one, that says it is safetensors."""
    content = pickle.dumps(Trap(mark, number))
    if number % 2:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("archive/data.pkl", content)
        content = stream.getvalue()
    (place / "model.safetensors").write_bytes(content)


def _metadata(place: Path, mark: Path, good: Path, number: int) -> None:
    """A checkpoint of torch.distributed.checkpoint, whose metadata is a pickle."""
    (place / ".metadata").write_bytes(pickle.dumps(Trap(mark, number)))
    (place / "__0_0.distcp").write_bytes(pickle.dumps(Trap(mark, number)))


def _header(place: Path, mark: Path, good: Path, number: int) -> None:
    """Safetensors whose header lies: about its length, about places, about dtypes."""
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    headers: list[Any] = [
        {"0.weight": {**entry, "data_offsets": [0, 1 << 40]}}, {"0.weight": {**entry, "data_offsets": [16, 0]}},
        {"0.weight": {**entry, "shape": [1 << 33, 1 << 33]}}, {"0.weight": {**entry, "dtype": "os.system"}},
        {"0.weight": {**entry, "shape": [-2, -2]}}, {"a": entry, "b": entry}, [1, 2], "text",
    ]  # fmt: skip
    text = json.dumps(headers[number % len(headers)]).encode()
    length = (len(text), 1 << 62, 0, len(text) + 5)[number // len(headers) % 4]
    (place / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + bytes(15))


def _index(place: Path, mark: Path, good: Path, number: int) -> None:
    """An index that leads elsewhere, or nowhere, or is no index."""
    elsewhere = (str(mark), "../../../../etc/passwd", "/etc/passwd", "model.bin", "", "..", "\x00", "a" * 5000)[number % 8]
    contents: list[Any] = [
        {"weight_map": {"0.linear.weight": elsewhere}}, {"weight_map": [elsewhere]}, {"weight_map": {"0.linear.weight": None}},
        [], {"weight_map": {"0.linear.weight": {"file": elsewhere}}}, 7,
    ]  # fmt: skip
    (place / INDEX).write_text(json.dumps(contents[number % len(contents)]))
    (place / "model.bin").write_bytes(pickle.dumps(Trap(mark, number)))


def _forged(place: Path, mark: Path, good: Path, number: int) -> None:
    """An index of ours with a right digest, and with something in it that is not right."""
    for path in good.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    index = json.loads((place / INDEX).read_text())
    index.pop("digest")
    ours = index["fxchimera"]
    first = next(iter(index["weight_map"]))
    changes: list[Any] = [
        lambda: index["weight_map"].update({first: "../good/" + index["weight_map"][first]}),
        lambda: index["weight_map"].update({first: str(mark)}),
        lambda: ours["values"].update(step="__import__('os').system('true')"),
        lambda: ours["values"].update(seed=None), lambda: ours["values"].update(extra=[1]),
        lambda: ours["digests"].pop(first), lambda: ours["digests"].update({first: 5}), lambda: ours.pop("headers"),
        lambda: ours.update(optimizer={"x": {"file": 1, "digest": 2, "more": 3}}), lambda: ours.pop("values"),
        lambda: index.update(weight_map=[]), lambda: index.update(fxchimera=[]), lambda: index["weight_map"].pop(first),
    ]  # fmt: skip
    changes[number % len(changes)]()
    (place / INDEX).write_text(_text({**index, "digest": _digest_of_index(index)}))


def _noise(place: Path, mark: Path, good: Path, number: int) -> None:
    """Random bytes, nothing at all, and JSON that is nested without end."""
    chosen = random.Random(number)
    name = ("model.safetensors", "model.bin", INDEX, "model.pth")[number % 4]
    content = chosen.randbytes(chosen.randrange(200))
    (place / name).write_bytes(b"[" * 100_000 if name == INDEX and number % 8 < 4 else content)
