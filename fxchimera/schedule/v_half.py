"""V-Half: half of 1F1B's activations on a V (Qi et al., "Pipeline parallelism with controllable memory", 2024).

A building block says at which slot rank r runs each of a micro-batch's four passes (D ranks, x = 3 for even D, else 0):

    forward, leg 0 (stage r)       2r                    backward, leg 0 (stage 2D-1-r)   3D + x + 2r - 1
    forward, leg 1 (2D-1-r)        3D - r - 2            backward, leg 1 (stage r)        6D + x - r - 2

It is repeated every 6 slots; no two passes of a rank meet, and the two free slots of every 6 take the weight gradients.  Warm-up
and cool-down have holes; passes there move to the earliest free slot that their data and the block's memory allow, first with the
weight gradients in place, then again with weight gradients dealt to whatever is free.  The steady state stays as it is.

Peak activations D/2+1; bubble 8.5F at D = 8 and F = I = W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import v_shape

__all__ = ["v_half"]

_WEIGHT = 4
_Pass = tuple[int, int, int]  # rank, type (0, 1 forward legs; 2, 3 backward legs; 4 weight gradient), number within the type


def v_half(num_ranks: int, n_microbatches: int) -> Order:
    """The V-Half order, for any D and N.

    Raises:
        ScheduleError: A number is below 1.
    """
    placement = v_shape(num_ranks, n_microbatches)
    block = _Block(num_ranks, n_microbatches)
    block.deal()
    block.squeeze(warm_up=True)
    block.settle()
    block.at = {where: slot for where, slot in block.at.items() if where[1] != _WEIGHT}
    block.squeeze(warm_up=False)
    block.deal()
    return Order("v-half", placement, tuple(block.actions()))


class _Block:
    """The repeated block, squeezed step by step; ``at`` is the slot of every pass."""

    def __init__(self, num_ranks: int, number: int) -> None:
        self.num_ranks, self.number = num_ranks, number
        gap = 0 if num_ranks % 2 else 3
        self.at: dict[_Pass, int] = {}
        for rank in range(num_ranks):
            offsets = 2 * rank, 3 * num_ranks - rank - 2, 3 * num_ranks + gap + 2 * rank - 1, 6 * num_ranks + gap - rank - 2
            for kind, offset in enumerate(offsets):
                for microbatch in range(number):
                    self.at[rank, kind, microbatch] = offset + 6 * microbatch

    def deal(self) -> None:
        """Puts the weight gradients into free slots, each as early as it can."""
        for rank, slots in enumerate(self.slots()):
            for number, slot in enumerate(_free(slots, 2 * self.number)):
                self.at[rank, _WEIGHT, number] = slot

    def slots(self) -> list[dict[int, int]]:
        """By rank, what it does at each slot, by type."""
        found: list[dict[int, int]] = [{} for _ in range(self.num_ranks)]
        for (rank, kind, _), slot in self.at.items():
            found[rank][slot] = kind
        return found

    def squeeze(self, *, warm_up: bool) -> None:
        """Moves the passes of the cool-down, and of the warm-up if asked, to earlier slots."""
        rows = [_Row(slots) for slots in self.slots()]
        cap = max(row.peak for row in rows)
        phase = 0
        for slot, where in sorted((slot, where) for where, slot in self.at.items()):
            rank, kind, number = where
            if phase == 0 and (rank, kind) == (0, 3):
                phase = 1
            elif phase == 1 and kind == 0 and number == self.number - 1:
                phase = 2
            if phase == 2 or (phase == 0 and warm_up):
                self.at[where] = rows[rank].moved(slot, self.earliest(where), cap)

    def earliest(self, where: _Pass, backwards: Sequence[int] = ()) -> int:
        """The first slot after everything that a pass needs; ``backwards`` are the first ones of its rank, if known."""
        rank, kind, number = where
        if kind == _WEIGHT:
            backwards = backwards or sorted(self.at[rank, leg, m] for leg in (2, 3) for m in range(self.number))
            return 1 + max(backwards[number], self.at[rank, kind, number - 1] if number else -1)
        source = rank + (-1 if kind % 2 == 0 else 1)
        needs = [(source, kind, number)] if 0 <= source < self.num_ranks else []
        if kind:
            needs.append((rank, kind - 1, number))
        if number:
            needs.append((rank, kind, number - 1))
        return 1 + max((self.at[need] for need in needs), default=-1)

    def settle(self) -> None:
        """Runs all passes in their order, each as soon as it can: slots in which nobody does anything useful go."""
        last = [-1] * self.num_ranks
        backwards: list[list[int]] = [[] for _ in last]  # by rank, in slots that are settled: before all others
        for _, where in sorted((slot, where) for where, slot in self.at.items()):
            rank = where[0]
            self.at[where] = last[rank] = max(last[rank] + 1, self.earliest(where, backwards[rank]))
            if where[1] in (2, 3):
                backwards[rank].append(last[rank])

    def actions(self) -> list[tuple[Action, ...]]:
        """By rank, its actions by slot."""
        last, found = 2 * self.num_ranks - 1, [list[Action]() for _ in range(self.num_ranks)]
        opened = [deque[Action]() for _ in range(self.num_ranks)]
        for _, (rank, kind, number) in sorted((slot, where) for where, slot in self.at.items()):
            if kind == _WEIGHT:
                first = opened[rank].popleft()
                found[rank].append(Action(first.stage, Kind.W, first.microbatch))
                continue
            stage = rank if kind in (0, 3) else last - rank
            found[rank].append(Action(stage, Kind.F if kind < 2 else Kind.I, number))
            if kind >= 2:
                opened[rank].append(found[rank][-1])
        return [tuple(actions) for actions in found]


def _free(slots: dict[int, int], count: int) -> list[int]:
    """The first free slots for so many weight gradients, each after its backward."""
    found: list[int] = []
    slot = pending = 0
    while len(found) < count:
        kind = slots.get(slot, -1)
        if kind in (2, 3):
            pending += 1
        elif kind < 0 and pending:
            pending -= 1
            found.append(slot)
        slot += 1
    return found


class _Row:
    """What a rank does at each slot, and what it holds before it; weight gradients that have no slot yet take every free one.

    Args:
        slots: The types by slot.
    """

    def __init__(self, slots: dict[int, int]) -> None:
        self.kinds = [slots.get(slot, -1) for slot in range(1 + max(slots))]
        self.dealt = _WEIGHT in slots.values()
        self.before: list[tuple[int, int]] = []  # chunks held, and backwards without their weight gradient
        state = (0, 0)
        for kind in self.kinds:
            self.before.append(state)
            state = self.after(state, kind)
        self.peak = max(held for held, _ in [*self.before, state])

    def after(self, state: tuple[int, int], kind: int) -> tuple[int, int]:
        """What is held after a slot."""
        held, pending = state
        if kind in (0, 1):
            return held + 1, pending
        if kind in (2, 3):
            return held, pending + 1
        if kind == _WEIGHT or (kind < 0 and pending and not self.dealt):
            return held - 1, pending - 1
        return state

    def moved(self, slot: int, earliest: int, cap: int) -> int:
        """Moves a pass to the earliest free slot at which the memory holds; returns it, or the pass's own if there is none."""
        for earlier in range(earliest, slot):
            if self.kinds[earlier] < 0 and self.allows(slot, earlier, cap):
                return earlier
        return slot

    def allows(self, slot: int, earlier: int, cap: int) -> bool:
        """Moves a pass if no more than the cap is held then; looks no further than to where all is as before."""
        kinds, before = self.kinds, self.before
        kinds[earlier], kinds[slot] = kinds[slot], -1
        state, changed = before[earlier], list[tuple[int, int]]()
        for place in range(earlier, len(kinds)):
            if place > slot and state == before[place]:
                break
            changed.append(state)
            state = self.after(state, kinds[place])
            if state[0] > cap:
                kinds[earlier], kinds[slot] = -1, kinds[earlier]
                return False
        before[earlier : earlier + len(changed)] = changed
        return True
