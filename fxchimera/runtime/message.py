"""What travels between ranks: a list of tensors with an identity, and its form as one flat byte buffer.

    | id | per tensor: present, stride ... | padding | tensor 0 | tensor 1 | ...

The byte form has a size that both ends know beforehand from the meta data, so a receive is posted before the sender has computed.
The header carries what is only known at run time: whether a gradient exists and how it is laid out in memory, because a
matmul on another layout need not round the same.  It also carries the message's identity, checked on arrival.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxchimera.errors import PipelineError
from fxchimera.schedule.action import Action, Kind
from fxchimera_passes.captured import TensorMeta

__all__ = ["Form", "Key", "Parcel", "Payload", "check_tensor"]

Payload = list[torch.Tensor | None]

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


class Form:
    """Where everything lies in the buffer of a message whose tensors have these ``metas``; the same at both ends."""

    __slots__ = ("bytes", "header", "metas", "places")

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self.metas = tuple(metas)
        self.header = struct.Struct(f"{1 + sum(1 + len(meta.shape) for meta in self.metas)}q")
        word, offset = 1, _aligned(self.header.size)
        self.places: list[tuple[TensorMeta, int, int, int]] = []  # of each tensor: its words in the header, its place in elements
        for meta in self.metas:
            self.places.append((meta, word, word + 1 + len(meta.shape), offset // meta.dtype.itemsize))
            word += 1 + len(meta.shape)
            offset += _aligned(meta.bytes)
        self.bytes = offset

    def unpack(self, key: Key, buffer: torch.Tensor, words: memoryview) -> Payload:
        """Return the tensors of a received buffer, given as ``words`` too; they share its memory, but no version counter.

        Raises:
            PipelineError: The buffer holds another message than the one expected.
        """
        header = self.header.unpack_from(words)
        if header[0] != key.word:
            raise PipelineError(f"expected {key}, but a message with the identity {header[0]:#x} arrived in its place")
        storage = buffer.untyped_storage()
        payload: Payload = []
        for meta, word, end, place in self.places:
            if header[word]:
                empty = torch.empty(0, dtype=meta.dtype, device="cpu")
                payload.append(empty.set_(storage, place, meta.shape, header[word + 1 : end]))
            else:
                payload.append(None)
        return payload


class Parcel:
    """A byte buffer for messages of one form, which may be filled again when it has been sent."""

    __slots__ = ("_form", "_plain", "buffer", "bytes", "metas")

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._form = Form(metas)
        self.metas = self._form.metas
        self.buffer = torch.empty(self._form.bytes, dtype=torch.uint8, device="cpu")
        self.bytes = self.buffer.numpy().data  # the same memory, as sockets want it
        self._plain = [self._view(meta, place, None) for meta, _, _, place in self._form.places]  # in row-major layout

    def fill(self, key: Key, payload: Payload) -> None:
        """Copy tensors in, each in its own dense memory layout (its own order of dimensions).

        Raises:
            PipelineError: A tensor has not the shape or dtype that was agreed for this message.
        """
        header = [key.word]
        for tensor, plain, (meta, _, _, place) in zip(payload, self._plain, self._form.places, strict=True):
            if tensor is None:
                header += [0] * (1 + len(meta.shape))
                continue
            check_tensor(key, tensor, meta)
            stride = tensor.stride()
            if not tensor.is_contiguous():
                stride = torch.empty_like(tensor, device="meta").stride()
                plain = self._view(meta, place, stride)
            plain.copy_(tensor.detach() if tensor.requires_grad else tensor)
            header += [1, *stride]
        self._form.header.pack_into(self.bytes, 0, *header)

    def _view(self, meta: TensorMeta, place: int, stride: tuple[int, ...] | None) -> torch.Tensor:
        if stride is None:
            start = place * meta.dtype.itemsize
            return self.buffer[start : start + meta.bytes].view(meta.dtype).view(meta.shape)
        return torch.empty(0, dtype=meta.dtype, device="cpu").set_(self.buffer.untyped_storage(), place, meta.shape, stride)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def check_tensor(key: Key, tensor: torch.Tensor, meta: TensorMeta) -> None:
    """Refuse a tensor that is not what was agreed for the message ``key``.

    Raises:
        PipelineError: Its shape, dtype or layout is another.
    """
    if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
        raise PipelineError(
            f"{key}: the stage produced a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, but the recording of this "
            f"signature has {meta.shape} and {meta.dtype}; the model's shapes depend on its values, which a pipeline cannot carry"
        )
    if tensor.layout != torch.strided:
        raise PipelineError(f"{key}: a tensor of layout {tensor.layout} cannot cross a process boundary; make it dense")
