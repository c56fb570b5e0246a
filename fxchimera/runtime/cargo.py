"""The form of a message whose tensors stay on their device: one flat buffer, and words for the host that say what is in it.

    words     per tensor: present, stride ...       they go ahead over a socket, with the message's identity
    buffer    | tensor 0 | tensor 1 | ...           goes from device to device

Shapes and dtypes are agreed; whether a gradient exists and how it is laid out in memory is known on the sender's host only, so
neither host has to wait for a device to learn it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxchimera.runtime.message import Key, Payload, check_tensor
from fxchimera_passes.captured import TensorMeta

__all__ = ["Cargo"]

_ALIGN = 64  # bytes; as in the form that sockets carry


class Cargo:
    """Where the tensors of a message with these ``metas`` lie in its buffer of so many ``bytes``."""

    __slots__ = ("bytes", "metas", "words")

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self.metas = tuple(metas)
        self.bytes = sum(_room(meta) for meta in self.metas) or _ALIGN  # no backend is asked to send nothing
        self.words = (TensorMeta((sum(1 + len(meta.shape) for meta in self.metas),), (1,), torch.int64, requires_grad=False),)
        """The meta data of the words, which are a message of their own."""

    def describe(self, key: Key, payload: Payload) -> list[int]:
        """Return the words of a message.

        Raises:
            PipelineError: A tensor has not the shape or dtype that was agreed for this message.
        """
        words: list[int] = []
        for tensor, meta in zip(payload, self.metas, strict=True):
            if tensor is None:
                words += [0] * (1 + len(meta.shape))
                continue
            check_tensor(key, tensor, meta)
            dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            words += [1, *dense.stride()]
        return words

    def pack(self, payload: Payload, words: Sequence[int], buffer: torch.Tensor) -> None:
        """Copy the tensors into a buffer, each in its own dense memory layout."""
        for tensor, place in zip(payload, self.unpack(words, buffer), strict=True):
            if tensor is not None and place is not None:
                place.copy_(tensor.detach())

    def unpack(self, words: Sequence[int], buffer: torch.Tensor) -> Payload:
        """Return the tensors in a buffer; they share its memory, but no version counter."""
        storage, payload, word, start = buffer.untyped_storage(), Payload(), 0, 0
        for meta in self.metas:
            end = word + 1 + len(meta.shape)
            found = None
            if words[word]:
                found = torch.empty(0, dtype=meta.dtype, device=buffer.device)
                found.set_(storage, start // meta.dtype.itemsize, meta.shape, tuple(words[word + 1 : end]))
            payload.append(found)
            word, start = end, start + _room(meta)
        return payload


def _room(meta: TensorMeta) -> int:
    return -(-meta.bytes // _ALIGN) * _ALIGN
