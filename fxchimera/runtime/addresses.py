"""The address under which other machines reach this one."""

from __future__ import annotations

import os
import socket
import struct

from fxchimera.errors import FxChimeraError

__all__ = ["INTERFACES", "own_address"]

INTERFACES = "GLOO_SOCKET_IFNAME"  # torch's own variable; of several interfaces the first is taken
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def own_address(host: str, port: int) -> str:
    """Return the address of this machine by which the others reach it: that of the interface that leads to ``host``."""
    named = os.environ.get(INTERFACES, "").split(",")[0].strip()
    if named:
        return _address_of(named)
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing
        found: str = probe.getsockname()[0]
        return found


def _address_of(interface: str) -> str:
    try:
        import fcntl  # not on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError) as error:
        here = ", ".join(name for _, name in socket.if_nameindex())
        raise FxChimeraError(
            f"{INTERFACES} names {interface!r}, whose IPv4 address cannot be found: {error}; the interfaces of this host are {here}"
        ) from error
    return socket.inet_ntoa(answer[20:24])
