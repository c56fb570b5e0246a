"""Stages through ``torch.compile``.

    recording -> cut -> stage graph -> torch.compile         each stage is compiled on its rank, forward and backward, as a whole

A compiled backward is one piece: of a split one, I does all and W nothing, and the search for an order is told so.  Random numbers
of a compiled stage have one seed a call (step, micro-batch, stage) instead of one a random operation: equal from run to run, but
not for other cuts.  Calls that draw or compile have torch's generators for themselves, as compiling saves and restores them; ranks
that compile at the same time are torch's own lock's business (none of 96 concurrent compilations went wrong with torch 2.13).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera_passes._torch import compiled, compiling_whole
from fxchimera_passes.captured import RandomKey
from fxchimera_passes.compilable import compilable
from fxchimera_passes.keyed import generators_alone
from fxchimera_passes.split import StageGraph
from fxchimera_passes.whole import module_at

__all__ = ["CompiledStage", "Compiler", "StageModule", "WholeStage", "compiler_of", "in_turn", "warn_compiled"]

_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options")
_REPLAYING = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
_REPLAYED = "triton.cudagraphs"


class StageModule(Protocol):
    """A stage that can run."""

    def forward(self, *values: torch.Tensor) -> Any:
        """Return what the stage sends on."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """How stages are compiled: the keyword arguments of ``torch.compile``."""

    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def bind(self, graph: StageGraph, root: nn.Module, device: torch.device | None = None) -> StageModule | None:
        """Make the compiled stage of ``graph`` on ``root``'s modules; None where a stage has to run operation by operation."""
        found = compilable(graph)
        if found is None:
            warnings.warn(
                f"stage {graph.stage.index} runs uncompiled: it checks what the recording assumed of values that depend on "
                "parameters, or seeds Python's random numbers; move that code into a submodule",
                stacklevel=2,
            )
            return None
        key = RandomKey(f"<stage {graph.stage.index}>", 0, 0) if found.random else None
        return CompiledStage(torch.compile(found.graph.bind(root, device=device), **self.options), key)


def compiler_of(compile: bool | Mapping[str, Any], *, recompute: Any, profile: bool) -> Compiler | None:  # noqa: A002
    """Read ``pipeline(..., compile=)``.

    Raises:
        FxChimeraError: It is not understood, or does not go with the other arguments.
    """
    if not isinstance(compile, (bool, Mapping)):
        raise FxChimeraError(f"compile must be True, False or a dict of torch.compile's keyword arguments, got {compile!r}")
    if compile is False:
        return None
    options = {} if compile is True else dict(compile)
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise FxChimeraError(f"compile has {unknown[0]!r}, which is none of torch.compile's {', '.join(_OPTIONS)}")
    if options.get("mode") in _REPLAYING or (options.get("options") or {}).get(_REPLAYED):
        raise FxChimeraError(
            f"compile={options!r} replays CUDA graphs, whose outputs the forward of the next micro-batch would overwrite before "
            'the backward has read them; use mode="default" or "max-autotune-no-cudagraphs"'
        )
    if recompute not in ("auto", "none") and set(recompute) != {"none"}:
        raise FxChimeraError(
            f"recompute={recompute!r} cannot be combined with compile: the compiler chooses itself what a backward computes again; "
            "leave recompute out"
        )
    if profile:
        raise FxChimeraError(
            "profile=True measures stages before they are compiled; leave it out, and call pipe.profile() on the compiled pipeline"
        )
    return Compiler(options)


def warn_compiled(model: nn.Module, compiler: Compiler | None) -> None:
    """Warn that what is cut into stages cannot run as the user has compiled it."""
    if compiled(model) and compiler is None:
        warnings.warn(
            "the model is compiled as a whole, but is cut into stages, which run uncompiled; pass compile=True, or a dict of "
            "torch.compile's arguments, to fxchimera.pipeline",
            stacklevel=4,
        )


def in_turn(module: StageModule, graph: StageGraph, root: nn.Module) -> StageModule:
    """Let a stage with modules that the user has compiled make its first call alone, as that call compiles them."""
    found = any(compiled(inner) for name in graph.modules for inner in module_at(root, name).modules())
    return _FirstAlone(module.forward) if found else module


class _FirstAlone:
    """Makes its first call, which compiles forward and backward, while no other rank draws or compiles."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._known = False

    def forward(self, *values: torch.Tensor) -> Any:
        """Return what the stage sends on."""
        if self._known:
            return self._call(*values)
        with generators_alone(None), compiling_whole():
            result = self._call(*values)
        self._known = True
        return result


class WholeStage:
    """A stage whose backward is not split."""


class CompiledStage(WholeStage, _FirstAlone):
    """A compiled stage; with ``key`` it draws random numbers, from a seed of the micro-batch named at present."""

    def __init__(self, call: Any, key: RandomKey | None) -> None:
        super().__init__(call)
        self._key = key

    def forward(self, *values: torch.Tensor) -> Any:
        """Return what the stage sends on."""
        if self._key is None:
            return super().forward(*values)
        with generators_alone(self._key):
            return super().forward(*values)
