"""TCP connections between ranks, one for each channel; all ranks make them at once.

gloo could carry the messages.  But it cannot be polled, and a wait that is cut short ends the connection, so a thread of ours has
to wait for it, behind gloo's own: a message wakes three threads, one after the other, where a socket wakes the one that wants it.
Between sleeping neighbours on one machine a message of 1 KiB took 0.19 ms over gloo and 0.07 ms over a socket.

    destination   listens on a free port, and puts address, port and a token of its own into the store
    source        connects, and says the token and the number of the channel; whoever says anything else is hung up on
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.addresses import INTERFACES, own_address
from fxchimera.runtime.failures.failure import NAP_SECONDS
from fxchimera.runtime.failures.sharedfailure import SharedFailure, raise_cause
from fxchimera.runtime.transport import Channel

__all__ = ["open_wires", "read", "read_soon", "write"]

_TOKEN_BYTES = 16
_TIMEVAL = struct.Struct("@ll")  # seconds and microseconds
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")
_NAP, _SHORTEST_NAP = 0.5, 0.001  # seconds between looks at whether another rank has failed meanwhile
_HELLO_SECONDS = 5.0  # how long who has connected may take to say what for
_STRANGERS = 16  # who have connected and are not answered yet do not keep the others out


def open_wires(failure: SharedFailure, name: str, rank: int, channels: Sequence[Channel]) -> dict[Channel, socket.socket]:
    """Collective: connect the ends of all ``channels`` of which this ``rank`` is one, under a ``name`` never used before.

    They wait in naps of ``NAP_SECONDS``.

    Raises:
        FxChimeraError: A rank did not come in time, or cannot be reached.
        PipelineError: Another rank has failed.
    """
    deadline = time.monotonic() + failure.limits.wait_seconds
    coming = {number: channel for number, channel in enumerate(channels) if channel[1] == rank}
    wires: dict[Channel, socket.socket] = {}
    with ExitStack() as undo:
        undo.callback(_close, wires)
        with _listen(failure, len(coming)) as server:
            token = secrets.token_bytes(_TOKEN_BYTES)
            host, port = server.getsockname()[:2]
            failure.store.set(f"{name}/{rank}", f"{host} {port} {token.hex()}")
            for number, channel in enumerate(channels):
                if channel[0] == rank:
                    wires[channel] = _dial(failure, f"{name}/{channel[1]}", channel, number, deadline)
            while coming:
                wire, number = _accept(failure, server, token, list(coming.values()), deadline)
                if number in coming:
                    wires[coming.pop(number)] = wire
        for wire in wires.values():
            _nap(wire)
        undo.pop_all()
    return wires


def write(wire: socket.socket, data: memoryview, between: Callable[[], None]) -> None:
    """Write all of ``data``; the connection waits in naps, and ``between`` them is called what ends the wait by raising.

    Raises:
        OSError: The connection broke.
    """
    while data:
        try:
            data = data[wire.send(data) :]
        except (TimeoutError, BlockingIOError):  # by Python's limit, or by the system's
            between()


def read(wire: socket.socket, room: memoryview, between: Callable[[], None]) -> None:
    """Read until ``room`` is full; otherwise as :func:`write`.

    Raises:
        OSError: The connection broke, or was closed.
    """
    while room:
        left = read_soon(wire, room)
        if len(left) == len(room):
            between()
        room = left


def read_soon(wire: socket.socket, room: memoryview) -> memoryview:
    """Read what comes first within a nap, and return the room that is left.

    Raises:
        OSError: The connection broke, or was closed.
    """
    try:
        count = wire.recv_into(room)
    except BlockingIOError:
        return room
    if not count:
        raise ConnectionError("the other end has closed it")
    return room[count:]


def _nap(wire: socket.socket) -> None:
    """Have the system end the connection's waits after ``NAP_SECONDS``; Python, by ``settimeout``, would poll before every call."""
    wire.settimeout(None)
    seconds = _TIMEVAL.pack(int(NAP_SECONDS), round(NAP_SECONDS % 1 * 1e6))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)


def _close(wires: Mapping[Channel, socket.socket]) -> None:
    for wire in wires.values():
        wire.close()


def _listen(failure: SharedFailure, most: int) -> socket.socket:
    host = own_address(failure.store.host, failure.store.port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family, backlog=most + _STRANGERS)
    server.settimeout(_NAP)
    return server


def _dial(failure: SharedFailure, key: str, channel: Channel, number: int, deadline: float) -> socket.socket:
    """Connect to a channel's destination."""
    nap = _SHORTEST_NAP
    while not failure.store.check([key]):  # waiting in the store, torch would write to the log about every nap
        _look(failure, channel[1], [channel], deadline)
        time.sleep(nap)
        nap = min(2 * nap, _NAP)
    host, port, token = failure.store.get(key).decode().split()
    try:
        wire = socket.create_connection((host, int(port)), timeout=failure.limits.wait_seconds)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.sendall(_HELLO.pack(bytes.fromhex(token), number))
    except OSError as error:
        raise_cause(failure)  # it may have failed meanwhile, and listens no more
        raise FxChimeraError(
            f"rank {channel[0]} cannot connect to rank {channel[1]} at {host} port {port}: {error}; a firewall between "
            f"the machines, or the wrong interface ({INTERFACES} names another)"
        ) from error
    return wire


def _accept(
    failure: SharedFailure, server: socket.socket, token: bytes, missing: Sequence[Channel], deadline: float
) -> tuple[socket.socket, int]:
    """Return the next connection with this token, and the number of its channel."""
    while True:
        try:
            wire, _ = server.accept()
        except TimeoutError:
            _look(failure, missing[0][0], missing, deadline)
            continue
        with suppress(OSError, struct.error):
            wire.settimeout(_HELLO_SECONDS)
            said, number = _HELLO.unpack(wire.recv(_HELLO.size, socket.MSG_WAITALL))
            if secrets.compare_digest(said, token):
                return wire, number
        wire.close()


def _look(failure: SharedFailure, missing: int, channels: Sequence[Channel], deadline: float) -> None:
    """Raise if there is no sense in waiting on for rank ``missing``."""
    failure.check()
    if time.monotonic() > deadline:
        raise FxChimeraError(
            f"rank {missing} has not connected within {failure.limits.wait_seconds:g} s (channel {channels[0]}); it is slow or "
            "gone. A longer limit is set by pipeline(..., wait_seconds=)"
        )
