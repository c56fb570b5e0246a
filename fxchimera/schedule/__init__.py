"""Schedules as plain values: make an order, lower it, prove it, simulate it.  Nothing here imports torch.

make_order -> lower -> check -> simulate -> Timeline
"""

from __future__ import annotations

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import channel, counterpart, peer
from fxchimera.schedule.check import Proof, check
from fxchimera.schedule.families import forward_only, make_order, schedules
from fxchimera.schedule.lower import lower
from fxchimera.schedule.order import Order, read_csv
from fxchimera.schedule.placement import Placement, bidirectional, one_way
from fxchimera.schedule.profile import Costs, SyncEdge
from fxchimera.schedule.simulate import simulate
from fxchimera.schedule.timeline import Event, Timeline

__all__ = [
    "Action",
    "Costs",
    "Event",
    "Kind",
    "Order",
    "Placement",
    "Proof",
    "SyncEdge",
    "Timeline",
    "bidirectional",
    "channel",
    "check",
    "counterpart",
    "forward_only",
    "lower",
    "make_order",
    "one_way",
    "peer",
    "read_csv",
    "schedules",
    "simulate",
]
