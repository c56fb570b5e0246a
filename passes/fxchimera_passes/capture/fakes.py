"""Swaps a model's parameters and buffers for fake tensors: shapes, types and autograd without values or memory.

A parameter on the meta device gets the device the model will run on, so a model too big for this host is recorded like any
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fxchimera_passes._torch import FakeTensor, FakeTensorMode, override_tables
from fxchimera_passes.errors import CaptureError

__all__ = ["capture_device", "fake_model", "fake_of"]


def capture_device(model: nn.Module, inputs: Sequence[Tensor], device: torch.device | None) -> torch.device:
    """Return the device to record for: ``device``, else that of the first tensor that is not a meta tensor, else the CPU.

    Raises:
        CaptureError: this host has no such device (torch aborts the process on fake tensors of a missing device).
    """
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    found = device or next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
    if found.type not in here:
        raise CaptureError(
            f"the model cannot be recorded for {found}: this host has only {' and '.join(here)}; move the model and batch there"
        )
    return found


def fake_of(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Return a fake leaf tensor like ``tensor`` on ``device``."""
    if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return mode.from_tensor(tensor)
    with mode, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[dict[int, Tensor]]:
    """Replace the parameters and buffers of ``model`` by fakes; a shared tensor gets one fake.

    Yields the model's own tensors by the identity of their fakes; the dict is empty afterwards, or whoever keeps a recording would
    keep weights in memory that this process may give away.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (tensor, fake_of(tensor, mode, device))
        return made[id(tensor)][1]

    with ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.enter_context(override_tables(module, replacement))
        real = {id(fake): tensor for tensor, fake in made.values()}
        stack.callback(real.clear)
        yield real
