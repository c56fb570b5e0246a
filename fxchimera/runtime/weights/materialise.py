"""Give a model built on the meta device the weights that this process needs, and no others.

    model on meta -> recorded, cut -> every rank: what its stages own <- checkpoint, else the model's own initialisation

The cut decides which rank owns a parameter, so a rank never holds more than its own stages and a part of a mapped file.  Buffers,
which stages of several ranks may read, are on every rank, as they are when the model is made with weights.  What other ranks own
stays on the meta device; copies of stages are refreshed from their owners in every step.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fxchimera.errors import CaptureError, FxChimeraError
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.slots import Slot, like, put, slots_of
from fxchimera.runtime.weights.initialise import DeviceOf, ParamInit, initialise
from fxchimera.runtime.weights.weightfiles import Checkpoint, WeightSource, open_weights
from fxchimera_passes.captured import Captured

__all__ = ["Weights", "materialise", "named_attributes", "placed", "refuse_meta"]

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a model's weights come from, as in ``fxchimera.pipeline``, and where they go, by name."""

    device_of: DeviceOf
    checkpoint: Checkpoint | None = None
    param_init_fn: ParamInit | None = None
    seed: int = 0


def materialise(
    captured: Captured, owner: Mapping[str, int], ranks: Collection[int], read: AbstractSet[str], weights: Weights
) -> None:
    """Replace what ``ranks`` own of ``captured.model`` on the meta device by tensors with values.

    With a checkpoint, parameters that have values already are overwritten in place.  Tensors are converted to the model's dtype.

    Args:
        captured: the recording of the model.
        owner: the rank that owns a parameter or buffer, by every name.
        ranks: the ranks that run in this process.
        read: buffers that a stage reads; those that nothing reads may stay without values.
        weights: where values come from.

    Raises:
        FxChimeraError: A checkpoint cannot be read, lacks a parameter, or has one of another shape; nothing fills a tensor.
    """
    model = captured.model
    slots = slots_of(model)
    if weights.checkpoint is None and not any(slot.tensor.is_meta for slot in slots):
        return
    source = None if weights.checkpoint is None else open_weights(weights.checkpoint)
    if source is not None:
        _compare_names(source, slots, may_lack=weights.param_init_fn is not None)
    own = [slot for slot in slots if not slot.is_parameter or owner.get(slot.name, 0) in ranks]
    found = {} if source is None else _loaded(source, own, weights.device_of)
    absent = [slot for slot in own if slot.tensor.is_meta and slot.name not in found]
    if source is not None and weights.param_init_fn is None and any(slot.is_parameter for slot in absent):
        raise _lacking(source, [slot for slot in absent if slot.is_parameter])  # a function's names are known only now
    if absent:
        found |= initialise(model, absent, weights.device_of, weights.seed, weights.param_init_fn)
    wanted = [slot for slot in absent if slot.name not in found and (slot.is_parameter or not read.isdisjoint(slot.names))]
    if wanted:
        raise _unfilled(model, wanted, source)
    for slot in own:
        for name in slot.names if slot.name in found else ():
            put(model, name, found[slot.name])


def placed(captured: Captured, owner: Mapping[str, int], world: World) -> DeviceOf:
    """Return where a tensor belongs: on the device of the rank that owns it, or of this process, for another's buffer."""

    def device_of(name: str) -> torch.device:
        rank = owner.get(name, 0)
        return world.devices.of(rank if rank in world.ranks else world.ranks[0]) or captured.device

    return device_of


def refuse_meta(model: nn.Module, what: str) -> None:
    """Raise if a parameter has no values; ``what`` is the call that needs them."""
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        raise FxChimeraError(
            f"{what} runs the model, but {len(absent)} parameters are on the meta device, {absent[0]!r} first; give them values "
            "before (model.to_empty() and load_state_dict)"
        )


@contextmanager
def named_attributes(model: nn.Module) -> Iterator[None]:
    """While ``model`` is recorded: if that fails, name the tensors that are no parameters or buffers and were built without values.

    Raises:
        CaptureError: The recording failed; its message says more then.
    """
    try:
        yield
    except CaptureError as error:
        lost = [
            f"{path}.{key}" if path else key
            for path, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.is_meta
        ]
        if not lost:
            raise
        raise type(error)(
            f"{error} The model holds tensors on the meta device that are neither parameters nor buffers, so that nothing can give "
            f'them values: {_list(lost)}. If the forward uses them, make them buffers, or build them under torch.device("cpu")'
        ) from error


def _compare_names(source: WeightSource, slots: Sequence[Slot], *, may_lack: bool) -> None:
    """Refuse a checkpoint that lacks parameters, on every rank alike, whoever owns them."""
    if source.names is None:
        return
    lacking = [slot for slot in slots if slot.is_parameter and source.names.isdisjoint(slot.names)]
    if lacking and not may_lack:
        raise _lacking(source, lacking)
    unknown = sorted(source.names.difference(itertools.chain.from_iterable(slot.names for slot in slots)))
    if unknown:
        warnings.warn(f"checkpoint {source.text} also holds {_list(unknown)}, which the model does not have", stacklevel=2)


def _loaded(source: WeightSource, own: Sequence[Slot], device_of: DeviceOf) -> dict[str, torch.Tensor]:
    """Read what the source has of ``own``; what has values already gets them in place."""
    found = {}
    for slot in own:
        names = slot.names if source.names is None else [name for name in slot.names if name in source.names]
        value = next((value for name in names if (value := source.read(name)) is not None), None)
        if value is None:
            continue
        target = like(slot.tensor, device_of(slot.name)) if slot.tensor.is_meta else slot.tensor
        _check(source, slot, value)
        with torch.no_grad():
            target.copy_(value)
        del value  # or its file would stay mapped while the next is opened
        if slot.tensor.is_meta:
            found[slot.name] = target
    return found


def _check(source: WeightSource, slot: Slot, value: torch.Tensor) -> None:
    if value.shape != slot.tensor.shape:
        raise FxChimeraError(
            f"checkpoint {source.text} holds {slot.name!r} with the shape {tuple(value.shape)}, but the model's is "
            f"{tuple(slot.tensor.shape)}"
        )
    kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (value, slot.tensor)]
    if kinds[0] != kinds[1] or value.is_meta:
        raise FxChimeraError(
            f"checkpoint {source.text} holds {slot.name!r} as {value.dtype} on {value.device}, which cannot become the model's "
            f"{slot.tensor.dtype}"
        )


def _lacking(source: WeightSource, slots: Sequence[Slot]) -> FxChimeraError:
    has = "" if source.names is None else f"; it holds {_list(sorted(source.names))}"
    return FxChimeraError(
        f"checkpoint {source.text} has no values for {len(slots)} parameters: {_list([slot.name for slot in slots])}{has}. If its "
        "names are others, pass a function: checkpoint=lambda name: tensors.get(other_name(name)); to initialise what it lacks, "
        "pass param_init_fn= too"
    )


def _unfilled(model: nn.Module, slots: Sequence[Slot], source: WeightSource | None) -> FxChimeraError:
    """Say what nothing has filled, and how to."""
    slot = slots[0]
    path = slot.name.rpartition(".")[0]
    kind = type(model.get_submodule(path)).__name__
    others = f" (and {len(slots) - 1} more)" if len(slots) > 1 else ""
    if slot.is_parameter:
        advice = "pass checkpoint=, or param_init_fn=, a function that fills the parameters of one module"
    else:
        held = "The checkpoint lacks it" if source is not None and slot.persistent else "No checkpoint holds it"
        advice = (
            f"{held}; let reset_parameters() compute it, or param_init_fn=, a function that fills what one module holds, or "
            "assign the module a buffer with values before"
        )
    return FxChimeraError(
        f"{slot}{others} is on the meta device and nothing fills it: {kind} has no reset_parameters(), and no _init_weights() or "
        f"init_weights() of the model writes it. {advice[0].upper()}{advice[1:]}"
    )


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
