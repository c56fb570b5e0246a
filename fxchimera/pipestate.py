"""What a pipeline keeps and gives back: the model's state over all ranks, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.steps.engine import Engine
from fxchimera.runtime.steps.preparation import Preparation
from fxchimera.runtime.weights.jsonvalues import from_json
from fxchimera.runtime.weights.saving import Held, load, save
from fxchimera.runtime.weights.state import gather_state, load_state, owned_state

__all__ = ["StatefulPipeline"]


class StatefulPipeline:
    """The part of a :class:`Pipeline` that saves and loads."""

    _model: nn.Module
    _owner: dict[str, int]
    _world: World
    _engine: Engine
    _preparation: Preparation
    _step: int
    _pending: tuple[int, ...]

    def _alone(self) -> AbstractContextManager[None]:
        raise AssertionError("the pipeline has one")

    def state_dict(self, *, full: bool = True) -> dict[str, Any]:
        """Return the model's state under its own names: all of it, on the CPU, on rank 0 ({} elsewhere).

        With ``full=False`` every process returns the entries that it owns, without copying.
        """
        if full:
            return gather_state(self._model, self._owner, self._world)
        return owned_state(self._model, self._owner, self._world)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state dict under the model's own names; under torchrun rank 0's counts."""
        load_state(self._model, state_dict, self._owner, self._world, strict=strict)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, every rank what it owns; the folder's earlier one stays whole until this one is complete.

        The model is stored as safetensors with the index that transformers writes, so ``pipeline(..., checkpoint=folder)``,
        ``from_pretrained`` and others read it too.  The optimizer's state is stored by parameter name.  Those who have
        ``torch.distributed.checkpoint`` in use can hand it ``state_dict(full=False)``; it neither replaces a checkpoint at one
        moment nor reads its metadata without running pickled code.

        Tensors that ``parallelize`` has sharded are saved whole, gathered one at a time.  Then all the pipelines that share them
        make the call, and the first of these writes.

        Args:
            folder: Made if need be; the ranks must share its file system.
            optimizer: One of ``pipe.parameters()``, each rank its own.
            extra: What else belongs to it, made of numbers, text, lists and dicts: a scheduler's ``state_dict()``, the epoch;
                rank 0's is kept.

        Raises:
            FxChimeraError: A rank cannot write; or steps under ``no_sync`` have left gradients that would be lost.
        """
        if self._pending:
            raise FxChimeraError(
                f"save() was called after {len(self._pending)} steps under no_sync(); save after the one that follows"
            )
        values = {"step": self._step, "seed": self._preparation.seed, "extra": dict(extra or {})}
        with self._alone():
            save(self._held(), Path(folder), optimizer, values)

    def load(self, folder: str | os.PathLike[str], *, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Go on from a checkpoint of :meth:`save`, with any number of stages; returns its ``extra``.

        Weights, buffers, the optimizer's state and options, and the step number and seed of the keyed randomness are as they
        were, so that training goes on as if it had never ended.  Where ``parallelize`` has sharded stages, each rank takes its
        share of what is read, and all pipelines that share parameters make the call.

        Raises:
            FxChimeraError: The checkpoint is missing, damaged, or not of this model and optimizer; nothing is changed then.
        """
        with self._alone():
            values = load(self._held(), Path(folder), optimizer)
            self._step, self._pending = int(values["step"]), ()
            self._preparation.seed = int(values["seed"])
        return dict(from_json(values["extra"]))

    def _held(self) -> Held:
        return Held(self._model, self._owner, self._engine.owned, self._world)
