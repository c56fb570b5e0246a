"""Which device each rank computes on.

python train.py      ranks are threads: all visible devices in turn, several ranks to a device if there are fewer devices
torchrun             ranks are processes: the device numbered LOCAL_RANK, modulo their number
devices=             what the user says, one for all ranks or one for each
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.devices.streams import Accelerator, TorchAccelerator, automatic_devices, is_host

__all__ = ["HOST", "DeviceLike", "Devices", "choose_devices"]

DeviceLike = str | torch.device
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Devices:
    """The device of every rank, by rank (empty: all on the CPU), and what their streams are made by.

    ``first`` is that of this process's first rank, which the model is recorded for; None for the model's own.
    """

    by_rank: tuple[torch.device, ...] = ()
    accelerator: Accelerator | None = None
    first: torch.device | None = None

    def of(self, rank: int) -> torch.device | None:
        """The device of one rank; None where it is the CPU, which needs no care."""
        return self.by_rank[rank] if self.by_rank else None


HOST = Devices()


def choose_devices(wanted: DeviceLike | Sequence[DeviceLike] | None, num_ranks: int, own: Sequence[int]) -> Devices:
    """Choose the devices of ``num_ranks`` ranks.

    Args:
        wanted: What the user asks for; None for every visible device, or the CPU where there is none.
        num_ranks: The number of ranks.
        own: The ranks of this process.  If it is one of several, torchrun's LOCAL_RANK tells its number on its machine.

    Raises:
        FxChimeraError: A device does not exist, there is another number of them than of ranks, or they are of several kinds.
    """
    if wanted is None:
        found: Sequence[torch.device] = automatic_devices()
        if found and len(own) < num_ranks:
            found = [found[_local_rank() % len(found)]]
    else:
        listed = [wanted] if isinstance(wanted, (str, torch.device)) else list(wanted)
        found = [_device(one) for one in listed]
        if len(found) not in (1, num_ranks):
            raise FxChimeraError(f"devices= has {len(found)} entries for {num_ranks} ranks; pass one for all, or one for each")
    kinds = sorted({device.type for device in found})
    if len(kinds) > 1:
        raise FxChimeraError(f"devices= names devices of the kinds {' and '.join(kinds)}; all ranks need one kind")
    if not found or kinds == ["cpu"]:
        return HOST
    by_rank = tuple(found[rank % len(found)] for rank in range(num_ranks))
    return Devices(by_rank, TorchAccelerator(), by_rank[own[0]])


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _device(wanted: DeviceLike) -> torch.device:
    """Understand one device of the user's, and see that it is there."""
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise FxChimeraError(f"devices= names {wanted!r}, which torch does not know: {error}") from error
    if device.type == "cpu":
        return _CPU
    here = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if here is not None else 0
    if is_host(device) or here is None or device.type != here.type:
        raise FxChimeraError(f"devices= names {device}, but this host has {'no accelerator' if here is None else here.type}")
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise FxChimeraError(f"devices= names {device}, but this host has {count} devices of that kind, numbered from 0")
    return torch.device(device.type, index)
