"""Accelerators: which there are, and the streams and events of one; the only file that names a kind of device.

    stream     operations one after the other; those of two streams run at the same time, in any order
    event      a place in a stream; another stream, or the host, waits until the first has come so far
    keep       tells the allocator that a tensor is used on another stream than it was made on, so that its memory is not used again
               before that stream has come so far

Everything goes through torch's device-agnostic ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``.  Tests put an
instrumented class in the place of :class:`TorchAccelerator`.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Accelerator", "TorchAccelerator", "automatic_devices", "is_host"]

_AUTOMATIC = ("cuda",)  # kinds that are taken without being asked for: they have streams, and were what this was written for


class Accelerator(Protocol):
    """What the runtime asks of a kind of device."""

    def stream(self, device: torch.device) -> torch.Stream:
        """Return a new stream of ``device``."""

    def current(self, device: torch.device) -> torch.Stream:
        """Return the stream that this thread's operations on ``device`` go to."""

    def use(self, stream: torch.Stream) -> None:
        """Let this thread's operations on the stream's device go to ``stream``, and make that device the current one."""

    def event(self, stream: torch.Stream, *, timed: bool = False) -> torch.Event:
        """Return an event at the present end of ``stream``."""

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Let what comes next on ``stream`` wait for ``event``; the host does not wait."""

    def keep(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Note that ``tensor`` is used on ``stream``, which is not the one that it was made on."""

    def seconds(self, first: torch.Event, last: torch.Event) -> float:
        """Return the seconds between two timed events of one device; the host waits for both."""


class TorchAccelerator:
    """The accelerator that torch has."""

    def stream(self, device: torch.device) -> torch.Stream:
        """Make a stream; torch has a pool of some tens for each device and gives them out in turn."""
        return torch.Stream(device=device)

    def current(self, device: torch.device) -> torch.Stream:
        """Ask torch."""
        return torch.accelerator.current_stream(device)

    def use(self, stream: torch.Stream) -> None:
        """Tell torch."""
        torch.accelerator.set_stream(stream)

    def event(self, stream: torch.Stream, *, timed: bool = False) -> torch.Event:
        """Record a new event."""
        event = torch.Event(device=stream.device, enable_timing=timed)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Let the stream wait."""
        stream.wait_event(event)

    def keep(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Tell the caching allocator."""
        tensor.record_stream(stream)

    def seconds(self, first: torch.Event, last: torch.Event) -> float:
        """Ask the device's clock."""
        last.synchronize()
        return first.elapsed_time(last) / 1000.0


def automatic_devices() -> tuple[torch.device, ...]:
    """Return all devices that are used unless the user names others; none where the CPU is."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in _AUTOMATIC:
        return ()
    return tuple(torch.device(found.type, index) for index in range(torch.accelerator.device_count()))


def is_host(device: torch.device) -> bool:
    """Tell whether a device has no streams: the CPU, or none at all."""
    return device.type in ("cpu", "meta")
