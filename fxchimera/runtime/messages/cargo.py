"""The form of a message whose tensors stay on their device: one flat buffer, and words for the host that say what is in it.

    words     per tensor: where it is, stride ..., or the number itself     they go ahead over a socket, with the identity
    buffer    | tensor 0 | tensor 1 | ...                                   goes from device to device

Shapes and dtypes are agreed; whether a gradient exists and how it is laid out in memory is known on the sender's host only, so
neither host has to wait for a device to learn it.  A single number that a sender has on its host stays on the hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fxchimera.runtime.devices.streams import is_host
from fxchimera.runtime.message import Key, Payload, check_tensor
from fxchimera_passes.captured import TensorMeta

__all__ = ["Cargo"]

_ALIGN = 64  # bytes; as in the form that sockets carry
_ABSENT, _IN_BUFFER, _IN_WORDS = range(3)
_WORD_BYTES = 8


class Cargo:
    """Where the tensors of a message with these ``metas`` lie in its buffer of so many ``bytes``."""

    __slots__ = ("bytes", "metas", "words")

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self.metas = tuple(metas)
        self.bytes = sum(map(_room, self.metas)) or _ALIGN  # no backend is asked to send nothing
        self.words = (TensorMeta((sum(map(_words, self.metas)),), (1,), torch.int64, requires_grad=False),)
        """The meta data of the words, which are a message of their own."""

    def describe(self, key: Key, payload: Payload) -> list[int]:
        """Return the words of a message.

        Raises:
            PipelineError: A tensor has not the shape or dtype that was agreed for this message.
        """
        words: list[int] = []
        for tensor, meta in zip(payload, self.metas, strict=True):
            if tensor is None:
                words += [_ABSENT] * _words(meta)
                continue
            check_tensor(key, tensor, meta)
            if not meta.shape:
                told = is_host(tensor.device) and meta.bytes <= _WORD_BYTES
                words += [_IN_WORDS, _number(tensor)] if told else [_IN_BUFFER, 0]
                continue
            dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            words += [_IN_BUFFER, *dense.stride()]
        return words

    def pack(self, payload: Payload, words: Sequence[int], buffer: torch.Tensor) -> None:
        """Copy the tensors into a buffer, each in its own dense memory layout."""
        for tensor, (where, place) in zip(payload, self._places(words, buffer), strict=True):
            if tensor is not None and where == _IN_BUFFER:
                place.copy_(tensor.detach())

    def unpack(self, words: Sequence[int], buffer: torch.Tensor) -> Payload:
        """Return the tensors of a message; those in the buffer share its memory, but no version counter."""
        return [None if where == _ABSENT else place for where, place in self._places(words, buffer)]

    def _places(self, words: Sequence[int], buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        storage, word, start = buffer.untyped_storage(), 0, 0
        for meta in self.metas:
            where, rest = words[word], words[word + 1 : word + _words(meta)]
            if where == _IN_WORDS:
                yield where, _tensor(rest[0], meta.dtype)
            else:
                place = torch.empty(0, dtype=meta.dtype, device=buffer.device)
                if where == _IN_BUFFER:
                    place.set_(storage, start // meta.dtype.itemsize, meta.shape, tuple(rest) if meta.shape else ())
                yield where, place
            word, start = word + _words(meta), start + _room(meta)


def _words(meta: TensorMeta) -> int:
    return 1 + (len(meta.shape) or 1)


def _room(meta: TensorMeta) -> int:
    return -(-meta.bytes // _ALIGN) * _ALIGN


def _number(tensor: torch.Tensor) -> int:
    """The bits of a single number on the host."""
    return int.from_bytes(bytes(tensor.detach().reshape(1).view(torch.uint8).tolist()), "little", signed=True)


def _tensor(number: int, dtype: torch.dtype) -> torch.Tensor:
    """The number with these bits."""
    bits = number.to_bytes(_WORD_BYTES, "little", signed=True)[: dtype.itemsize]
    return torch.frombuffer(bytearray(bits), dtype=dtype).view(())
