"""What an order must hold before its messages are looked at: every computation once, on its rank, after its data."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement

__all__ = ["complete", "depends"]


def complete(order: Order) -> None:
    """Proves that every action is on its right rank, none is there twice, and every computation is there.

    Every stage needs one F for every micro-batch, and either one B or one I and one W; in a forward-only order the F alone.

    Raises:
        ScheduleError: Naming the action, its rank, and the action it clashes with or leaves alone.
    """
    place = order.placement
    present: set[Action] = set()
    for rank, actions in enumerate(order.ranks):
        seen: dict[Action, int] = {}
        for position, action in enumerate(actions):
            _belongs(action, rank, place)
            if action in seen:
                raise ScheduleError(f"{action} is there twice on rank {rank}, at positions {seen[action]} and {position}")
            seen[action] = position
        present.update(seen)
    backward = not order.is_forward_only
    for microbatch in range(place.n_microbatches):
        for stage in range(place.num_stages):
            _computed(stage, microbatch, present, place, backward=backward)


def _computed(stage: int, microbatch: int, present: Container[Action], place: Placement, *, backward: bool) -> None:
    """Proves that one stage's computations of one micro-batch are there; a forward-only order has no backward at all."""
    rank = place.rank(stage, microbatch)
    forward, full, half, weight = (Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    found = [action for action in (full, half, weight) if action in present]
    if forward not in present:
        alone = f"runs {' and '.join(map(str, found))} but " if found else ""
        raise ScheduleError(f"rank {rank} {alone}never runs {forward}: it is missing")
    if backward and found not in ([full], [half, weight]):
        raise ScheduleError(
            f"rank {rank} runs {forward} and must run {full}, or {half} and {weight}; "
            f"it runs {' and '.join(map(str, found)) or 'none of them'}"
        )


def _belongs(action: Action, rank: int, place: Placement) -> None:
    """Proves that the action's stage and micro-batch exist and are on this rank."""
    if action.microbatch is None:
        holder = rank if action.kind in (Kind.SEND_G, Kind.RECV_P) else action.peer
        assert holder is not None
        if holder >= place.num_ranks or action.stage not in [stage for _, stage in place.replicas(holder)]:
            raise ScheduleError(f"rank {rank}: {action} names a mirror of stage {action.stage} on rank {holder}, which holds none")
        return
    if action.stage >= place.num_stages or action.microbatch >= place.n_microbatches:
        raise ScheduleError(
            f"rank {rank}: {action} names a stage or micro-batch that is not there; "
            f"there are {place.num_stages} stages and {place.n_microbatches} micro-batches"
        )
    right = place.rank(action.stage, action.microbatch)
    if right != rank:
        way = place.pipe_name(place.pipe_of[action.microbatch])
        raise ScheduleError(
            f"{action} is on rank {rank}, but stage {action.stage} of micro-batch {action.microbatch}, which goes {way}, "
            f"is on rank {right}"
        )


def depends(order: Order) -> None:
    """Proves that on every rank each action comes after what it needs there.

    Raises:
        ScheduleError: Naming the action, what it needs, and where that is.
    """
    for rank, actions in enumerate(order.ranks):
        seen: dict[Action, int] = {}
        for position, action in enumerate(actions):
            for choices in _needs(action, rank, order.placement):
                if not any(choice in seen for choice in choices):
                    raise ScheduleError(_too_early(rank, position, actions, choices))
            seen[action] = position
        _exchange(rank, actions)


def _needs(action: Action, rank: int, place: Placement) -> Iterator[tuple[Action, ...]]:
    """What must come before an action on its rank; of each tuple one action is enough."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if microbatch is None:
        return
    if kind is Kind.F and stage > 0:
        local = place.rank(stage - 1, microbatch) == rank
        yield (Action(stage - 1, Kind.F, microbatch) if local else Action(stage, Kind.RECV_F, microbatch),)
    elif kind in (Kind.B, Kind.I):
        yield (Action(stage, Kind.F, microbatch),)
        if stage < place.num_stages - 1:
            local = place.rank(stage + 1, microbatch) == rank
            both = Action(stage + 1, Kind.B, microbatch), Action(stage + 1, Kind.I, microbatch)
            yield both if local else (Action(stage, Kind.RECV_B, microbatch),)
    elif kind is Kind.W:
        yield (Action(stage, Kind.I, microbatch),)
    elif kind is Kind.SEND_F:
        yield (Action(stage, Kind.F, microbatch),)
    elif kind is Kind.SEND_B:
        yield Action(stage, Kind.B, microbatch), Action(stage, Kind.I, microbatch)


def _exchange(rank: int, actions: Sequence[Action]) -> None:
    """Proves that parameters come before a mirror's first computation and gradients leave after its last backward."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.kind.is_compute:
            first.setdefault(action.stage, position)
        if action.kind.is_backward:
            last[action.stage] = position
    for position, action in enumerate(actions):
        if action.kind is Kind.SEND_G and position < last.get(action.stage, -1):
            late = last[action.stage]
            raise ScheduleError(
                f"rank {rank} sends gradients with {action} (position {position}) before the last backward of that replica, "
                f"{actions[late]} (position {late})"
            )
        if action.kind is Kind.RECV_P and position > first.get(action.stage, position):
            early = first[action.stage]
            raise ScheduleError(
                f"rank {rank} takes parameters with {action} (position {position}) after the first computation of that replica, "
                f"{actions[early]} (position {early})"
            )


def _too_early(rank: int, position: int, actions: Sequence[Action], choices: tuple[Action, ...]) -> str:
    later = [(actions.index(choice, position), choice) for choice in choices if choice in actions[position:]]
    where = (
        f"{later[0][1]}, which comes later (position {later[0][0]})"
        if later
        else f"{' or '.join(map(str, choices))}, which is missing"
    )
    return f"rank {rank} runs {actions[position]} (position {position}) before {where}"
