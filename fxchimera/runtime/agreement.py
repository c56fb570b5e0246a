"""Before data moves, all ranks agree that they are about to do the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import torch

from fxchimera.errors import BatchError, FxChimeraError
from fxchimera.runtime.world import World

__all__ = ["Call", "agree", "agree_on_batch"]

_T = TypeVar("_T")


class Call(IntEnum):
    """What a rank is about to do with a batch."""

    STEP = 0
    FORWARD = 1
    EVALUATE = 2


def agree(world: World, what: str, text: str) -> None:
    """Collective: raise on every rank unless ``text`` is the same on all.

    Raises:
        FxChimeraError: It differs; the message names the ranks.
    """
    texts = world.gather_objects(hashlib.sha256(text.encode()).hexdigest())
    odd = [rank for rank, other in enumerate(texts) if other != texts[0]]
    if odd:
        raise FxChimeraError(
            f"ranks {odd} made another {what} than rank 0; every rank must build the same model and pass the same arguments"
        )


def agree_on_batch(world: World, call: Call, prepare: Callable[[], tuple[_T, int, str]]) -> _T:
    """Collective: prepare a batch on every rank, and go on only if it is the same on all.

    ``prepare`` returns the prepared value, a digest of what must agree, and a description for the error.

    Raises:
        BatchError: Another rank refused its batch, makes another call, or has another batch.
    """
    prepared: _T | None = None
    error: Exception | None = None
    digest, description = 0, ""
    try:
        prepared, digest, description = prepare()
    except Exception as failure:
        error = failure
        description = f"{type(failure).__name__}: {failure}"
    words = world.gather(torch.tensor([call, int(error is None), digest]))
    if any(not torch.equal(other, words[0]) for other in words) or error is not None:
        descriptions = world.gather_objects(description) if world.num_processes > 1 else [description]
        if error is not None:
            raise error
        raise BatchError(_disagreement([other.tolist() for other in words], descriptions))
    assert prepared is not None
    return prepared


def _disagreement(words: list[list[int]], descriptions: list[str]) -> str:
    refused = [rank for rank, (_, ok, _) in enumerate(words) if not ok]
    if refused:
        return f"rank {refused[0]} refused its batch: {descriptions[refused[0]]}"
    if len({call for call, _, _ in words}) > 1:
        calls = ", ".join(f"rank {rank} {Call(call).name.lower()}" for rank, (call, _, _) in enumerate(words))
        return f"the ranks make different calls: {calls}; every rank must make the same calls in the same order"
    listing = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(descriptions))
    return f"the ranks of a pipeline must pass the same batch, but passed {listing}"
