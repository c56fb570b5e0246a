"""Orders as the files of ``torch.distributed.pipelining``: one line a rank, one action a cell, computations alone.

torch's runtime knows one copy of each stage, so only one-way orders (V shapes and interleaved ones among them) can be written.
"""

from __future__ import annotations

from pathlib import Path

from fxchimera.errors import ScheduleError
from fxchimera.schedule.infer import read_order
from fxchimera.schedule.order import Order

__all__ = ["computations", "one_way_only", "read_csv_file", "write_csv_file"]


def write_csv_file(order: Order, path: str | Path) -> None:
    """Write the computations of ``order`` as the file that torch's schedules load (``_load_csv``, format ``compute_only``).

    Raises:
        ScheduleError: The order has several pipes.
    """
    Path(path).write_text(one_way_only(order).to_csv())


def read_csv_file(path: str | Path) -> Order:
    """Read an order from a file of torch's, of computations alone or with messages, which are left out: ours are made anew.

    Raises:
        ScheduleError: A cell is no action, or the forward of a micro-batch is missing or there twice.
    """
    path = Path(path)
    return computations(read_order(path.read_text(), path.name))


def one_way_only(order: Order) -> Order:
    """The computations of an order with one copy of each stage.

    Raises:
        ScheduleError: The order has several pipes.
    """
    pipes = len(order.placement.pipes)
    if pipes > 1:
        raise ScheduleError(
            f"the order {order.name!r} has {pipes} pipes, and torch.distributed.pipelining has one copy of each stage; take a "
            "one-way family, such as 1f1b, interleaved-1f1b or zbv"
        )
    return computations(order)


def computations(order: Order) -> Order:
    """The order without its messages."""
    ranks = tuple(tuple(action for action in actions if action.kind.is_compute) for actions in order.ranks)
    return Order(order.name, order.placement, ranks)
