"""Before data moves, all ranks agree that they are about to do the same thing."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

import torch

from fxchimera.errors import BatchError, FxChimeraError
from fxchimera.runtime.grid import Grid
from fxchimera.runtime.processes.world import World

__all__ = ["Call", "Prepared", "agree", "agree_on_batch"]

_T = TypeVar("_T")

_ALIKE = (
    "all {} pipelines were given the same batch, which adds nothing to what one of them computes; give each its own shard, by "
    "pipe.data_parallel_size and pipe.data_parallel_rank"
)
_AROUND = 60  # characters before and after a difference of two texts
_COMMON = 3  # words of a call that all pipelines share: the call, whether the batch was accepted, and ``common``


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
    """A prepared batch: words for what must agree exactly, its values and the recordings, and what describes it in an error.

    Pipelines have batches of their own; only ``common`` must be the same for all.
    """

    value: _T
    common: int
    signature: int
    content: int
    cut: int
    description: Callable[[], str]


def agree(world: World, what: str, text: str) -> None:
    """Collective: raise on every rank unless ``text`` is the same on all.

    Raises:
        FxChimeraError: It differs; the message names the ranks, and the first difference.
    """
    digests = world.gather_objects(hashlib.sha256(text.encode()).hexdigest(), "pipeline()")
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        texts = world.gather_objects(text, "pipeline()")
        ours, theirs = _difference(texts[0], texts[odd[0]])
        raise FxChimeraError(
            f"ranks {odd} made another {what} than rank 0; every rank must build the same model and pass the same arguments. "
            f"The first difference: rank 0 has {ours!r}, rank {odd[0]} has {theirs!r}"
        )


def _difference(one: str, other: str) -> tuple[str, str]:
    """Where two texts begin to differ, with a few words around it."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(shared - _AROUND, 0)
    return one[start : shared + _AROUND], other[start : shared + _AROUND]


def agree_on_batch(world: World, call: Call, prepare: Callable[[], Prepared[_T]], trainable: int, settle: Callable[[], int]) -> _T:
    """Collective: prepare a batch on every rank, and go on only if it is the same on all.

    ``trainable`` is a word for which parameters the rank takes as frozen; if it differs, ``settle`` brings the ranks together and
    the batch is prepared once more.

    Raises:
        BatchError: Another rank refused its batch, makes another call, or has another batch.

    Warns:
        UserWarning: In a step, all pipelines have one and the same batch (said on rank 0).
    """
    prepared: Prepared[_T] | None = None
    error: Exception | None = None
    try:
        prepared = prepare()
    except Exception as failure:
        error = failure
    words_of_batch = (0, 0, 0, 0)
    if prepared is not None:
        words_of_batch = (prepared.common, prepared.signature, prepared.content, prepared.cut)
    own = torch.tensor([trainable, call, int(error is None), *words_of_batch], device="cpu")
    words = [other.tolist() for other in world.gather(own, "the start of a step or a forward-only call")]
    if any(other[0] != words[0][0] for other in words):
        return agree_on_batch(world, call, prepare, settle(), lambda: 0)
    words = [other[1:] for other in words]
    odd = _odd_pipeline(words, world.grid)
    if odd is not None or error is not None:
        description = prepared.description() if prepared is not None else f"{type(error).__name__}: {error}"
        descriptions = world.gather_objects(description, "descriptions of the batch") if world.num_processes > 1 else [description]
        if error is not None:
            raise error
        assert odd is not None
        raise BatchError(_disagreement(words, odd, descriptions))
    assert prepared is not None
    if world.grid.width > 1 and world.process == 0 and call is Call.STEP and all(other == words[0] for other in words):
        warnings.warn(_ALIKE.format(world.grid.width), stacklevel=4)
    return prepared.value


def _odd_pipeline(words: list[list[int]], grid: Grid) -> tuple[int, ...] | None:
    """The ranks of the first pipeline whose words differ from each other, or in what is common from those of rank 0."""
    for row in grid.processes:
        first = words[row[0]]
        if any(words[rank] != first for rank in row) or first[:_COMMON] != words[0][:_COMMON]:
            return row
    return None


def _disagreement(words: list[list[int]], pipeline: tuple[int, ...], descriptions: list[str]) -> str:
    refused = [rank for rank, (_, ok, *_) in enumerate(words) if not ok]
    if refused:
        return f"rank {refused[0]} refused its batch: {descriptions[refused[0]]}"
    if len({call for call, *_ in words}) > 1:
        calls = ", ".join(f"rank {rank} {Call(call).words}" for rank, (call, *_) in enumerate(words))
        return f"the ranks make different calls: {calls}; every rank must make the same calls in the same order"
    first = pipeline[0]
    if len({(common, signature) for common, signature in (words[rank][2:4] for rank in pipeline)}) > 1:
        listing = "; ".join(f"rank {rank}: {descriptions[rank]}" for rank in pipeline)
        return f"the ranks of a pipeline must pass the same batch, but passed {listing}"
    if words[first][:_COMMON] != words[0][:_COMMON]:
        return (
            "all pipelines must make a call in the same mode and with the same loss_scale, but passed "
            f"rank 0: {descriptions[0]}; rank {first}: {descriptions[first]}"
        )
    odd = [rank for rank in pipeline if words[rank][4] != words[first][4]]
    if not odd:
        return (
            f"the ranks recorded the model differently for the same batch ({descriptions[first]}): a module computes shapes from "
            "the values of parameters, which a rank has of its own stages only. Call pipe.warmup(<arguments>, lend_parameters=True)"
        )
    return (
        f"the ranks of a pipeline must pass the same batch, but the values on ranks {odd} differ from those on rank {first} "
        f"(shapes and dtypes agree: {descriptions[first]}); seed and shard every rank's data loader alike"
    )
