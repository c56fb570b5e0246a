"""What two ranks have to agree on of their batches, as one number each, and in words for an error."""

from __future__ import annotations

import hashlib

import torch

from fxchimera.runtime.microbatch import Batch

__all__ = ["describe_batch", "digest", "sample"]

_SAMPLED = 64  # values of a tensor, for each micro-batch
_NUMPYS = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool})  # dtypes that numpy has, the usual ones


def digest(batch: Batch) -> int:
    """Return 63 bits that agree on two ranks iff shapes, dtypes and plain values of their batches do."""
    forms = {form: place for place, form in enumerate(dict.fromkeys(m.form for m in batch.microbatches))}
    arguments = {id(m.arguments): m.arguments for m in batch.microbatches}  # one for all
    each = [(forms[m.form], len(m.inputs), m.rows) for m in batch.microbatches]
    text = repr((list(forms), each, list(arguments.values())))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def sample(batch: Batch) -> int:
    """Return 63 bits that differ, most likely, between two ranks whose batches have other values.

    Some values of every tensor are looked at, evenly spread, so that the cost does not grow with the batch.
    """
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in batch.tensors:
        hashed.update(_some_bytes(tensor, _SAMPLED * len(batch.microbatches)))
    return int.from_bytes(hashed.digest(), "big") >> 1


def describe_batch(batch: Batch) -> str:
    """Return the shapes and dtypes of a batch's micro-batches as a text for errors."""
    texts = []
    for microbatch in batch.microbatches:
        tensors = (*microbatch.inputs, *microbatch.targets)
        texts.append(", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors))
    kinds = list(dict.fromkeys(texts))
    return " and ".join(f"{texts.count(kind)} x ({kind})" for kind in kinds)


def _some_bytes(tensor: torch.Tensor, most: int) -> bytes:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return b""
    step = max(tensor.numel() // most, 1)
    if (
        type(tensor) is torch.Tensor
        and tensor.dtype in _NUMPYS
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        return tensor.detach().numpy().reshape(-1)[: most * step : step].tobytes()
    if tensor.is_contiguous():
        picked = tensor.detach().reshape(-1)[: most * step : step]
    else:
        places = torch.arange(min(most, tensor.numel()), device="cpu") * step
        picked = tensor.detach()[torch.unravel_index(places.to(tensor.device), tensor.shape)]
    return picked.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
