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

    __slots__ = ("_places", "bytes", "header", "metas")

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self.metas = tuple(metas)
        self.header = struct.Struct(f"{1 + sum(1 + len(meta.shape) for meta in self.metas)}q")
        word, offset = 1, _aligned(self.header.size)
        self._places: list[tuple[TensorMeta, int, int, int]] = []  # of each tensor: its words in the header, its place in bytes
        for meta in self.metas:
            self._places.append((meta, word, word + 1 + len(meta.shape), offset))
            word += 1 + len(meta.shape)
            offset += _aligned(meta.bytes)
        self.bytes = offset

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in a buffer as they lie in it when they are row-major; each is one user of its memory."""
        return [buffer[place : place + meta.bytes].view(meta.dtype).view(meta.shape).data for meta, _, _, place in self._places]

    def fill(self, key: Key, payload: Payload, views: Sequence[torch.Tensor], words: memoryview) -> None:
        """Copy tensors into a buffer, given by its ``views`` and as ``words``, each in its own dense layout (order of dimensions).

        Raises:
            PipelineError: A tensor has not the shape or dtype that was agreed for this message.
        """
        header = [key.word]
        for tensor, view, (meta, _, _, _) in zip(payload, views, self._places, strict=True):
            if tensor is None:
                header += [0] * (1 + len(meta.shape))
                continue
            check_tensor(key, tensor, meta)
            stride = tensor.stride()
            if stride != view.stride() and not tensor.is_contiguous():
                stride = torch.empty_like(tensor, device="meta").stride()
                view = _laid_out(view, stride)
            view.copy_(tensor.detach() if tensor.requires_grad else tensor)
            header += (1, *stride)
        self.header.pack_into(words, 0, *header)

    def unpack(self, key: Key, views: Sequence[torch.Tensor], words: memoryview) -> Payload:
        """Return the tensors of a received buffer, given as for :meth:`fill`; they share its memory, but no version counter.

        Raises:
            PipelineError: The buffer holds another message than the one expected.
        """
        header = self.header.unpack_from(words)
        if header[0] != key.word:
            raise PipelineError(f"expected {key}, but a message with the identity {header[0]:#x} arrived in its place")
        payload: Payload = []
        for view, (_, word, end, _) in zip(views, self._places, strict=True):
            if header[word]:
                stride = header[word + 1 : end]
                payload.append((view if stride == view.stride() else _laid_out(view, stride)).data)
            else:
                payload.append(None)
        return payload


class Parcel:
    """A byte buffer for messages of one form, which may be filled again when it has been sent."""

    __slots__ = ("_form", "_views", "buffer", "bytes", "metas")

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._form = Form(metas)
        self.metas = self._form.metas
        self.buffer = torch.empty(self._form.bytes, dtype=torch.uint8, device="cpu")
        self.bytes = self.buffer.numpy().data  # the same memory, as sockets want it
        self._views = self._form.views(self.buffer)

    def fill(self, key: Key, payload: Payload) -> None:
        """Copy tensors in; see :meth:`Form.fill`."""
        self._form.fill(key, payload, self._views, self.bytes)


def _laid_out(view: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The memory of ``view`` in another dense layout."""
    return view.as_strided(view.shape, stride)


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
