"""Schedules as plain values: make an order, lower it, prove it, simulate it.  Nothing here imports torch.

make_order or auto -> lower -> check -> simulate -> Timeline
                 certify -> Certificate
"""

from __future__ import annotations

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.auto import auto
from fxchimera.schedule.bounds import Bound, lower_bound
from fxchimera.schedule.certificate import Certificate, certify
from fxchimera.schedule.channel import channel, counterpart, peer
from fxchimera.schedule.check import Proof, check
from fxchimera.schedule.families import forward_only, make_order, schedules
from fxchimera.schedule.files import read_csv_file, write_csv_file
from fxchimera.schedule.infer import read_order
from fxchimera.schedule.limits import Found, Limits
from fxchimera.schedule.lower import lower
from fxchimera.schedule.order import Order, read_csv
from fxchimera.schedule.placement import (
    Placement,
    bidirectional,
    bidirectional_v,
    interleaved,
    mirrored_pairs,
    one_way,
    v_shape,
)
from fxchimera.schedule.problem import Problem
from fxchimera.schedule.profile import Costs, SyncEdge
from fxchimera.schedule.simulate import simulate
from fxchimera.schedule.timeline import Event, Timeline

__all__ = [
    "Action",
    "Bound",
    "Certificate",
    "Costs",
    "Event",
    "Found",
    "Kind",
    "Limits",
    "Order",
    "Placement",
    "Problem",
    "Proof",
    "SyncEdge",
    "Timeline",
    "auto",
    "bidirectional",
    "bidirectional_v",
    "certify",
    "channel",
    "check",
    "counterpart",
    "forward_only",
    "interleaved",
    "lower",
    "lower_bound",
    "make_order",
    "mirrored_pairs",
    "one_way",
    "peer",
    "read_csv",
    "read_csv_file",
    "read_order",
    "schedules",
    "simulate",
    "v_shape",
    "write_csv_file",
]
