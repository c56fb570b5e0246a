"""Before data moves, all ranks agree that they are about to do the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

import torch

from fxchimera.errors import BatchError, FxChimeraError
from fxchimera.runtime.world import World

__all__ = ["Call", "Prepared", "agree", "agree_on_batch"]

_T = TypeVar("_T")


class Call(IntEnum):
    """What a rank is about to do with a batch."""

    STEP = 0
    FORWARD = 1
    EVALUATE = 2
    UNSYNCHRONISED_STEP = 3
    WARMUP = 4

    @property
    def words(self) -> str:
        """The name for people."""
        return ("step", "forward", "evaluate", "step under no_sync", "warmup")[self]


@dataclass(frozen=True, slots=True)
class Prepared(Generic[_T]):
    """A prepared batch: words for what must agree exactly, its values and the recordings, and what describes it in an error."""

    value: _T
    signature: int
    content: int
    cut: int
    description: Callable[[], str]


def agree(world: World, what: str, text: str) -> None:
    """Collective: raise on every rank unless ``text`` is the same on all.

    Raises:
        FxChimeraError: It differs; the message names the ranks.
    """
    texts = world.gather_objects(hashlib.sha256(text.encode()).hexdigest(), "pipeline()")
    odd = [rank for rank, other in enumerate(texts) if other != texts[0]]
    if odd:
        raise FxChimeraError(
            f"ranks {odd} made another {what} than rank 0; every rank must build the same model and pass the same arguments"
        )


def agree_on_batch(world: World, call: Call, prepare: Callable[[], Prepared[_T]], trainable: int, settle: Callable[[], int]) -> _T:
    """Collective: prepare a batch on every rank, and go on only if it is the same on all.

    ``trainable`` is a word for which parameters the rank takes as frozen; if it differs, ``settle`` brings the ranks together and
    the batch is prepared once more.

    Raises:
        BatchError: Another rank refused its batch, makes another call, or has another batch.
    """
    prepared: Prepared[_T] | None = None
    error: Exception | None = None
    try:
        prepared = prepare()
    except Exception as failure:
        error = failure
    words_of_batch = (prepared.signature, prepared.content, prepared.cut) if prepared is not None else (0, 0, 0)
    own = torch.tensor([trainable, call, int(error is None), *words_of_batch], device="cpu")
    words = [other.tolist() for other in world.gather(own, "the start of a step or a forward-only call")]
    if any(other[0] != words[0][0] for other in words):
        return agree_on_batch(world, call, prepare, settle(), lambda: 0)
    if any(other != words[0] for other in words) or error is not None:
        description = prepared.description() if prepared is not None else f"{type(error).__name__}: {error}"
        descriptions = world.gather_objects(description, "descriptions of the batch") if world.num_processes > 1 else [description]
        if error is not None:
            raise error
        raise BatchError(_disagreement([other[1:] for other in words], descriptions))
    assert prepared is not None
    return prepared.value


def _disagreement(words: list[list[int]], descriptions: list[str]) -> str:
    refused = [rank for rank, (_, ok, *_) in enumerate(words) if not ok]
    if refused:
        return f"rank {refused[0]} refused its batch: {descriptions[refused[0]]}"
    if len({call for call, *_ in words}) > 1:
        calls = ", ".join(f"rank {rank} {Call(call).words}" for rank, (call, *_) in enumerate(words))
        return f"the ranks make different calls: {calls}; every rank must make the same calls in the same order"
    if len({signature for _, _, signature, _, _ in words}) > 1:
        listing = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(descriptions))
        return f"the ranks of a pipeline must pass the same batch, but passed {listing}"
    odd = [rank for rank, (_, _, _, content, _) in enumerate(words) if content != words[0][3]]
    if not odd:
        return (
            f"the ranks recorded the model differently for the same batch ({descriptions[0]}): a module computes shapes from the "
            "values of parameters, which a rank has of its own stages only. Call pipe.warmup(<arguments>, lend_parameters=True)"
        )
    return (
        f"the ranks of a pipeline must pass the same batch, but the values on ranks {odd} differ from those on rank 0 (shapes and "
        f"dtypes agree: {descriptions[0]}); seed and shard every rank's data loader alike"
    )
