"""What travels between ranks: a list of tensors with an identity, and its form as one flat byte buffer.

    | id | per tensor: present, stride ... | padding | tensor 0 | tensor 1 | ...

The byte form has a size that both ends know beforehand from the meta data, so a receive is posted before the sender has computed.
The header carries what is only known at run time: whether a gradient exists and how it is laid out in memory, because a
matmul on another layout need not round the same.  It also carries the message's identity, checked on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxchimera.errors import PipelineError
from fxchimera.schedule.action import Action, Kind
from fxchimera_passes.captured import TensorMeta

__all__ = ["Key", "Parcel", "Payload", "message_bytes", "pack", "unpack"]

Payload = list[torch.Tensor | None]

_WORD = 8
_ALIGN = 64  # bytes; every tensor starts where vector instructions like it
_FLOWS = "FBPG"


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of a message within a step: its flow, the stage that receives or mirrors it, and its micro-batch."""

    flow: int
    stage: int
    microbatch: int

    @classmethod
    def of(cls, action: Action) -> Key:
        """Return the key of the message that a SEND or RECV action moves; both ends give the same."""
        stage = action.stage
        if action.kind is Kind.SEND_F:
            stage += 1
        elif action.kind is Kind.SEND_B:
            stage -= 1
        return cls(_FLOWS.index(action.kind.content), stage, -1 if action.microbatch is None else action.microbatch)

    @property
    def word(self) -> int:
        """The key as one integer, for tags and headers."""
        return (self.flow << 48) | (self.stage << 24) | (self.microbatch + 1)

    def __str__(self) -> str:
        what = ("activations", "gradients", "refreshed parameters", "parameter gradients")[self.flow]
        return f"{what} for stage {self.stage}" + (f", micro-batch {self.microbatch}" if self.microbatch >= 0 else "")


def message_bytes(metas: Sequence[TensorMeta]) -> int:
    """Return the size in bytes of the buffer that carries tensors of these shapes and dtypes."""
    return _header_bytes(metas) + sum(_aligned(meta.bytes) for meta in metas)


class Parcel:
    """A byte buffer for messages of one form (``metas``), which may be filled again when it has been sent."""

    __slots__ = ("_header", "_places", "buffer", "metas")

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self.metas = tuple(metas)
        self.buffer = torch.empty(message_bytes(metas), dtype=torch.uint8, device="cpu")
        words = 1 + sum(1 + len(meta.shape) for meta in metas)
        self._header = self.buffer[: words * _WORD].numpy().view(np.int64)
        self._places: list[tuple[int, torch.Tensor]] = []  # offset of each tensor, and one in row-major layout that lies there
        offset = _header_bytes(metas)
        for meta in metas:
            room = self.buffer[offset : offset + meta.bytes]
            self._places.append((offset, room.view(meta.dtype).view(meta.shape)))
            offset += _aligned(meta.bytes)

    def fill(self, key: Key, payload: Payload) -> None:
        """Copy tensors in, each in its own dense memory layout (its own order of dimensions).

        Raises:
            PipelineError: A tensor has not the shape or dtype that was agreed for this message.
        """
        header = [key.word]
        for tensor, meta, (offset, plain) in zip(payload, self.metas, self._places, strict=True):
            if tensor is None:
                header += [0] * (1 + len(meta.shape))
                continue
            _match(key, tensor, meta)
            if tensor.is_contiguous():
                stride, place = tensor.stride(), plain
            else:
                stride = torch.empty_like(tensor, device="meta").stride()
                place = _view(self.buffer, offset, meta, stride)
            place.copy_(tensor.detach())
            header += [1, *stride]
        self._header[:] = header


def pack(key: Key, payload: Payload, metas: Sequence[TensorMeta]) -> torch.Tensor:
    """Copy tensors into one new byte buffer; see :meth:`Parcel.fill`."""
    parcel = Parcel(metas)
    parcel.fill(key, payload)
    return parcel.buffer


def unpack(key: Key, buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> Payload:
    """Return the tensors of a received buffer; they share its memory, but no version counter.

    Raises:
        PipelineError: The buffer holds another message than the one expected.
    """
    header = buffer[: _header_bytes(metas)].numpy().view(np.int64).tolist()
    if header[0] != key.word:
        raise PipelineError(f"expected {key}, but a message with the identity {header[0]:#x} arrived in its place")
    payload: Payload = []
    position, offset = 1, _header_bytes(metas)
    for meta in metas:
        stride = tuple(header[position + 1 : position + 1 + len(meta.shape)])
        payload.append(_view(buffer, offset, meta, stride) if header[position] else None)
        position += 1 + len(meta.shape)
        offset += _aligned(meta.bytes)
    return payload


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _header_bytes(metas: Sequence[TensorMeta]) -> int:
    return _aligned((1 + sum(1 + len(meta.shape) for meta in metas)) * _WORD)


def _view(buffer: torch.Tensor, offset: int, meta: TensorMeta, stride: Sequence[int]) -> torch.Tensor:
    empty = torch.empty(0, dtype=meta.dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), offset // meta.dtype.itemsize, meta.shape, tuple(stride))


def _match(key: Key, tensor: torch.Tensor, meta: TensorMeta) -> None:
    if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
        raise PipelineError(
            f"{key}: the stage produced a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, but the recording of this "
            f"signature has {meta.shape} and {meta.dtype}; the model's shapes depend on its values, which a pipeline cannot carry"
        )
    if tensor.layout != torch.strided:
        raise PipelineError(f"{key}: a tensor of layout {tensor.layout} cannot cross a process boundary; make it dense")
