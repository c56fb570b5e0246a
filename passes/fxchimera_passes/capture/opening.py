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
from fxchimera_passes.capture.names import require_submodule
from fxchimera_passes.capture.profile import Profile
from fxchimera_passes.errors import PartitionError

__all__ = ["can_open", "choose", "choose_around", "only_collects", "refusal"]

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


def can_open(module: nn.Module) -> bool:
    """Tell whether recording the inner calls of ``module`` keeps its behaviour."""
    return not obstacle(module)


def obstacle(module: nn.Module) -> str:
    """Say why the inner calls of ``module`` cannot be recorded, "" when they can."""
    if isinstance(module, torch.jit.ScriptModule) or compiled(module):
        return "it is compiled"
    if type(module) not in _CONTAINERS and type(module).__module__.partition(".")[0] == "torch":
        return "it is one of torch's own layers"
    forward, backward = hooks_of(module)
    return "" if not backward and all(only_collects(hook) for hook in forward) else "it has hooks"


def only_collects(hook: Any) -> bool:
    """Tell whether ``hook`` is one of transformers' own, which copy a module's output when asked to."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def choose(
    profile: Profile, model: nn.Module, closed: Collection[str], opened: Collection[str], *, limit: float
) -> Mapping[str, str]:
    """Return the modules to open beside the ``opened`` ones, by qualified name, with the reason.

    One is opened when a call of it does more than ``limit`` of the work; a limit of 1 or more opens none.
    """
    found, within = dict[str, str](), {*opened}
    for name, module in model.named_modules():  # parents come before their children
        callers = profile.callers.get(name, {}).keys()
        if name in closed or name in opened or callers.isdisjoint(within) or not can_open(module):
            continue
        share = profile.share(name)
        if share > limit and any(True for _ in module.children()):
            found[name] = f"one call does {share:.0%} of the work, more than {limit:.0%}"
            within.add(name)
    return found


def choose_around(profile: Profile, model: nn.Module, closed: Mapping[str, str], points: Collection[str]) -> dict[str, str]:
    """Map each module that must be opened for a cut before one of ``points`` to that split point.

    Raises:
        PartitionError: an unknown name, or one inside a module that has to stay whole.
    """
    opened: dict[str, str] = {}
    for point in points:
        require_submodule(model, point)
        for name in _callers(profile, model, point):
            why = closed.get(name) or obstacle(model.get_submodule(name))
            if name and why:
                raise refusal(model, point, name, why)
            opened.setdefault(name, point)
    return opened


def refusal(model: nn.Module, point: str, name: str, why: str) -> PartitionError:
    """Say that no stage can begin with the module ``point``, because ``name`` around it stays one call."""
    kind = type(model.get_submodule(name)).__name__
    return PartitionError(
        f"split point {point!r} lies inside {name!r} ({kind}), which has to stay one call: {why}. Name that module or one beside it"
    )


def _callers(profile: Profile, model: nn.Module, point: str) -> list[str]:
    """List the modules around the first call of ``point``, or of the first module in it when it is a container."""
    canonical = {id(module): name for name, module in model.named_modules()}
    start = canonical[id(model.get_submodule(point))]
    if start not in profile.callers:
        inside = [name for name in profile.callers if name.startswith(f"{start}.")]
        start = min(inside, key=lambda name: name.count("."), default="")
    found = dict.fromkeys([start])
    while start and (caller := next(iter(profile.callers[start]))) not in found:
        found[caller] = None
        start = caller
    return list(found)[1:]
