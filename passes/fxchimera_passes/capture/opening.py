"""Chooses which modules to record by their inner calls: as few as a balanced cut needs.

A first recording measures every module call; then containers are opened from the top down while a single call is heavier than a
stage may tolerate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from fxchimera_passes._torch import compiled, hooks_of
from fxchimera_passes.capture.profile import Profile

__all__ = ["can_open", "choose"]

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


def can_open(module: nn.Module) -> bool:
    """Tell whether recording the inner calls of ``module`` keeps its behaviour."""
    if isinstance(module, torch.jit.ScriptModule) or compiled(module):
        return False
    if type(module) not in _CONTAINERS and type(module).__module__.partition(".")[0] == "torch":
        return False
    forward, backward = hooks_of(module)
    return not backward and all(_only_collects(hook) for hook in forward)


def _only_collects(hook: Any) -> bool:
    """Tell whether ``hook`` is one of transformers' own, which copy a module's output when asked to."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def choose(profile: Profile, model: nn.Module, closed: Collection[str], *, num_stages: int, grain: float) -> Mapping[str, str]:
    """Return the modules to open, by qualified name, with the reason."""
    opened = {"": "the model itself"}
    if num_stages == 1:
        return opened
    for name, module in model.named_modules():  # parents come before their children
        callers = profile.callers.get(name, set())
        if not name or name in closed or not callers & opened.keys() or not can_open(module):
            continue
        share = profile.share(name)
        if share > grain / num_stages and any(True for _ in module.children()):
            opened[name] = f"one call does {share:.0%} of the work, more than {grain / num_stages:.0%}"
    return opened
