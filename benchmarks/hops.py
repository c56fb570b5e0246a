"""How long a message between two processes is on its way, over sockets and over torch's groups.

    torchrun --nproc-per-node 2 benchmarks/hops.py [--devices cuda]

One rank sleeps a little, as between the messages of a schedule, and sends a float32 tensor that it makes from the time; the other
waits for it and reads it.  The median of some messages is printed for each size, and the host's seconds in ``send``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from fxchimera.runtime.devices.devices import choose_devices
from fxchimera.runtime.devices.lanes import Lane, Lanes
from fxchimera.runtime.failures.failure import Limits
from fxchimera.runtime.message import Key
from fxchimera.runtime.messages.carriers import choose_backend, process_transport
from fxchimera.runtime.processes.layout import Layout
from fxchimera.runtime.processes.world import World, make_world
from fxchimera.runtime.transport import Channel, Expected, Transport
from fxchimera_passes.captured import TensorMeta

_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
_ROUNDS, _COLD = 60, 10
_PAUSE_SECONDS = 0.003
_LINE: Channel = (0, 1, "down-F")


def main() -> None:
    """Print one line for each transport and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu", help="the kind of device: cpu (default) or cuda")
    kind = parser.parse_args().devices
    world = make_world(Layout.of(2, None, "compact", None, "pp"), Limits(60.0))
    rank = world.ranks[0]
    if kind != "cpu":
        world.devices = choose_devices(None, 2, world.ranks)
    for carrier in ("sockets", "groups"):
        world.backends = choose_backend(carrier, world)
        lane = Lanes(world.devices, world.ranks).of(rank)
        transport = process_transport(rank, [_LINE], world, lane, {_LINE: 2})
        for size in _BYTES:
            _measure(world, transport, lane, carrier, size)
        transport.close()
    world.part()
    world.close()


def _measure(world: World, transport: Transport, lane: Lane | None, carrier: str, size: int) -> None:
    value = torch.zeros(size // 4, device="cpu" if lane is None else lane.device)
    meta, hops, hosts = (TensorMeta.of(value),), [], []
    for number in range(_ROUNDS):
        key = Key(0, 1, number)
        world.gather(torch.zeros(1), "the next message")
        if world.ranks[0] == 0:
            time.sleep(_PAUSE_SECONDS)
            began = time.monotonic()
            transport.send(_LINE, key, [value], meta)
            hosts.append(time.monotonic() - began)
        else:
            transport.post([Expected(_LINE, key, meta)])
            (found,) = transport.receive(_LINE, key, "rank 1")
            assert found is not None
            float(found[-1])
            began = time.monotonic()
        times = [float(one) for one in world.gather(torch.tensor([began], dtype=torch.float64), "times")]
        hops.append(times[1] - times[0])
    if world.ranks[0] == 0:
        hop, host = (1e3 * statistics.median(values[_COLD:]) for values in (hops, hosts))
        print(f"{carrier:8} {size:>9} bytes: {hop:7.3f} ms on the way, {host:7.3f} ms in send")


if __name__ == "__main__":
    main()
