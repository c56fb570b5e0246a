"""One message in a buffer of its own, and out again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxchimera.runtime.message import Form, Key, Parcel, Payload
from fxchimera_passes.captured import TensorMeta

__all__ = ["pack", "unpack"]


def pack(key: Key, payload: Payload, agreed: Sequence[TensorMeta]) -> Tensor:
    parcel = Parcel(agreed)
    parcel.fill(key, payload)
    return parcel.buffer


def unpack(key: Key, buffer: Tensor, agreed: Sequence[TensorMeta]) -> Payload:
    form = Form(agreed)
    return form.unpack(key, form.views(buffer), buffer.numpy().data)
