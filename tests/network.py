"""Two networks on one machine: a network namespace each, and a cable of our own between them, which is slow and can be cut.

    namespace a: tun 10.99.0.1  --packets-->  this process waits ``delay``  --packets-->  tun 10.99.0.2 :namespace b

The kernel's own delay (tc netem) is often not built in, so a thread for each direction carries the packets.  Inside a namespace
nothing of the outside is reachable, its loopback neither: what passes between the two goes over the cable.
"""

from __future__ import annotations

import fcntl
import os
import queue
import select
import struct
import subprocess
import threading
import time
from types import TracebackType

__all__ = ["ADDRESSES", "INTERFACE", "Network", "reason_against"]

ADDRESSES = ("10.99.0.1", "10.99.0.2")
INTERFACE = "cable0"
_TUN = "/dev/net/tun"
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_PACKET_BYTES = 1 << 16
_HIGHEST_WAIT = 0.1


def reason_against() -> str:
    """Why this machine cannot do it; "" if it can."""
    try:
        with Network(0.0):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces and tun devices cannot be made here: {error}"


class Network:
    """Context: the two namespaces; ``delay`` is how long a packet is under way, in seconds."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.names = tuple(f"fxchimera{os.getpid()}{side}" for side in "ab")
        self._open = threading.Event()
        self._ended = threading.Event()
        self._handles: list[int] = []
        self._threads: list[threading.Thread] = []
        self.packets = 0

    def __enter__(self) -> Network:
        try:
            self._handles = [self._plug(name, address) for name, address in zip(self.names, ADDRESSES, strict=True)]
        except BaseException:
            self._remove()
            raise
        self._open.set()
        for source, destination in (self._handles, self._handles[::-1]):
            under_way: queue.SimpleQueue[tuple[float, bytes] | None] = queue.SimpleQueue()
            self._threads += [
                threading.Thread(target=self._collect, args=(source, under_way), daemon=True),
                threading.Thread(target=self._deliver, args=(destination, under_way), daemon=True),
            ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._remove()

    def command(self, side: int) -> list[str]:
        """What to put before a command that is to run on one of the two."""
        return ["ip", "netns", "exec", self.names[side]]

    def cut(self) -> None:
        """From now on every packet is lost, as when a cable is pulled: nobody is told."""
        self._open.clear()

    def _plug(self, name: str, address: str) -> int:
        """Make a namespace with one interface, and return the handle that its packets come out of."""
        handle = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        self._handles.append(handle)
        interface = f"fx{os.getpid()}"[:15]
        fcntl.ioctl(handle, _SET_INTERFACE, struct.pack("16sH22s", interface.encode(), _TUN_WITHOUT_HEADER, b""))
        _ip("netns", "add", name)
        _ip("link", "set", interface, "netns", name, "name", INTERFACE)
        for words in (
            ["addr", "add", f"{address}/24", "dev", INTERFACE],
            ["link", "set", INTERFACE, "up"],
            ["link", "set", "lo", "up"],
        ):
            _ip("-n", name, *words)
        return handle

    def _remove(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _collect(self, source: int, under_way: queue.SimpleQueue[tuple[float, bytes] | None]) -> None:
        while not self._ended.is_set():
            if _readable(source) and (packet := _read(source)) and self._open.is_set():
                under_way.put((time.monotonic() + self.delay, packet))
                self.packets += 1
        under_way.put(None)

    def _deliver(self, destination: int, under_way: queue.SimpleQueue[tuple[float, bytes] | None]) -> None:
        while (item := under_way.get()) is not None:
            due, packet = item
            time.sleep(max(due - time.monotonic(), 0.0))
            if self._open.is_set():
                os.write(destination, packet)


def _readable(handle: int) -> bool:
    return bool(select.select([handle], [], [], _HIGHEST_WAIT)[0])


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, _PACKET_BYTES)
    except BlockingIOError:
        return b""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
