"""DualPipe and DualPipeV: forwards of one direction run beside backwards of the other (DeepSeek-V3, 2024).

Two flows pass each rank: flow 0 reaches it early (few stages before it), flow 1 late.  With H ranks in a half, h the rank's place
in it and M micro-batches a flow, a rank runs eight phases; F0B1 is a forward of flow 0 and a backward of flow 1:

    1   2(H-1-h)      F0                      5   H-1-h      B1 F1B0
    2   h+1           F0 F1                   6   h+1        B1 B0      (the second half of them split: I only)
    3   H-1-h         I1 W F1                 7   H-1-h      W I0
    4   M-2H+h+1      F0B1 F1B0               8   h+1        W

DualPipe: D = 2H ranks, flow 0 the direction that starts nearer to the rank, two copies of the weights.  DualPipeV: the ranks of one
half only, H = D; flow 0 is the way down the V and flow 1 the way back.

At F = I = W, of 1/D of the model, with F and B of a pair one after the other: bubble (D/2-1)F and (D-1)F/2, peak D+1 and D+1/2.
As blocks that start and end together: (D/2-1)(F&B + B - 3W).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import bidirectional, v_shape

__all__ = ["dualpipe", "dualpipev"]


def dualpipe(num_stages: int, n_microbatches: int) -> Order:
    """The DualPipe order, for even D and even N >= 2D.

    Raises:
        ScheduleError: D or N is not such a number.
    """
    _refuse("dualpipe", num_stages, n_microbatches, even=True)
    placement = bidirectional(num_stages, n_microbatches)
    half, share = num_stages // 2, n_microbatches // 2
    ranks = []
    for rank in range(num_stages):
        near = rank < half  # to the entry of the down pipe

        def action(flow: int, kind: Kind, index: int, rank: int = rank, near: bool = near) -> Action:
            down = (flow == 0) == near
            return Action(rank if down else num_stages - 1 - rank, kind, index + (0 if down else share))

        ranks.append(_rank(half, min(rank, num_stages - 1 - rank), share, action))
    return Order("dualpipe", placement, tuple(ranks))


def dualpipev(num_ranks: int, n_microbatches: int) -> Order:
    """The DualPipeV order, for N >= 2D.

    Raises:
        ScheduleError: N is smaller.
    """
    _refuse("dualpipev", num_ranks, n_microbatches, even=False)
    ranks = []
    for rank in range(num_ranks):

        def action(flow: int, kind: Kind, index: int, rank: int = rank) -> Action:
            return Action(2 * num_ranks - 1 - rank if flow else rank, kind, index)

        ranks.append(_rank(num_ranks, rank, n_microbatches, action))
    return Order("dualpipev", v_shape(num_ranks, n_microbatches), tuple(ranks))


class _Writer:
    """Writes one rank's actions, counting the micro-batches of each flow."""

    def __init__(self, action: Callable[[int, Kind, int], Action]) -> None:
        self.action, self.out = action, list[Action]()
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.open: deque[tuple[int, int]] = deque()

    def forward(self, flow: int) -> None:
        self.out.append(self.action(flow, Kind.F, self.forwards[flow]))
        self.forwards[flow] += 1

    def backward(self, flow: int, *, split: bool = False) -> None:
        self.out.append(self.action(flow, Kind.I if split else Kind.B, self.backwards[flow]))
        if split:
            self.open.append((flow, self.backwards[flow]))
        self.backwards[flow] += 1

    def weight(self) -> None:
        flow, index = self.open.popleft()
        self.out.append(self.action(flow, Kind.W, index))


def _rank(half: int, place: int, share: int, action: Callable[[int, Kind, int], Action]) -> tuple[Action, ...]:
    """The eight phases."""
    write, before = _Writer(action), half - 1 - place
    for _ in range(2 * before):
        write.forward(0)
    for _ in range(place + 1):
        write.forward(0)
        write.forward(1)
    for _ in range(before):
        write.backward(1, split=True)
        write.weight()
        write.forward(1)
    for _ in range(share - 2 * half + place + 1):
        write.forward(0)
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for _ in range(before):
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for number in range(2 * (place + 1)):
        write.backward(1 - number % 2, split=number >= place + 1)
    for _ in range(before):
        write.weight()
        write.backward(0, split=True)
    while write.open:
        write.weight()
    return tuple(write.out)


def _refuse(name: str, num_ranks: int, n_microbatches: int, *, even: bool) -> None:
    if num_ranks < 1 or n_microbatches < 2 * num_ranks or (even and (num_ranks % 2 or n_microbatches % 2)):
        wanted = "an even number of stages D and an even number of micro-batches" if even else "a number of micro-batches"
        raise ScheduleError(
            f"{name} needs {wanted} of at least 2*D; got num_stages={num_ranks}, n_microbatches={n_microbatches}; "
            'use schedule="auto", which takes any numbers'
        )
