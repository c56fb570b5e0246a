"""How many bytes every rank needs for a cut and an order, and what a cap on them is.

    rank 0 of D = 2, both directions        owner of stage 0: parameters, gradients, optimizer state
                                            mirror of stage 1: a second copy of its parameters and of their gradients
                                            activations: the micro-batches in flight, as the order says, times what each saves
                                            recomputation: what one backward makes again, for a moment
                                            messages: one of each flow on its way

Not counted: what kernels need for a moment, the user's batch, and what the allocator rounds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxchimera.planner.caps import readable_bytes
from fxchimera.schedule.action import Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement
from fxchimera_passes.plan import Stage

__all__ = ["Holdings", "RankMemory", "Sizes", "holdings", "rank_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes by name: of the parameters, of the gradients of those that are trained, and of the buffers.

    ``optimizer_values`` is how many numbers the optimizer keeps for each trained one: 2 for AdamW, 1 for SGD with momentum.
    """

    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    buffers: Mapping[str, int] = field(default_factory=dict)
    optimizer_values: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that one rank needs, and the most micro-batches it holds at once of each of its stages.

    ``parameters`` are the owned ones, and the buffers; ``mirrors`` the copies of parameters that other stages own, with gradients.
    ``recomputation`` is what a backward needs for a moment while it runs a part of the forward again.  ``in_flight`` are (pipe,
    stage, micro-batches).
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    mirrors: int
    activations: int
    messages: int
    in_flight: tuple[tuple[int, int, int], ...]
    recomputation: int = 0

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        held = self.activations + self.recomputation + self.messages
        return self.parameters + self.gradients + self.optimizer + self.mirrors + held

    def words(self) -> str:
        """What to compare with, and to do, when this rank has run out of memory."""
        held = ", ".join(f"{count} of stage {stage}" for _, stage, count in self.in_flight)
        return (
            f"the plan predicted {readable_bytes(self.total)} for rank {self.rank}, {readable_bytes(self.activations)} of it "
            f"activations of micro-batches in flight ({held}); memory= keeps plans within a limit, recompute= and more "
            "micro-batches need less"
        )

    def as_dict(self) -> dict[str, object]:
        """The fields and the total; ready for JSON."""
        names = ("rank", "parameters", "gradients", "optimizer", "mirrors", "activations", "recomputation", "messages", "total")
        held = [{"pipe": pipe, "stage": stage, "microbatches": count} for pipe, stage, count in self.in_flight]
        return {**{name: getattr(self, name) for name in names}, "in_flight": held}


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one rank holds in flight: for its replicas, (pipe, stage) each, the counts that are not less than others everywhere."""

    replicas: tuple[tuple[int, int], ...]
    counts: tuple[tuple[int, ...], ...]

    def most(self) -> tuple[int, ...]:
        """By replica, the most micro-batches at once."""
        return tuple(max(column) for column in zip(*self.counts, strict=True))

    def peak(self, sizes: Sequence[int]) -> int:
        """The most bytes at once, when one micro-batch holds ``sizes[s]`` bytes in stage s."""
        return max(sum(n * sizes[stage] for n, (_, stage) in zip(row, self.replicas, strict=True)) for row in self.counts)


def holdings(order: Order) -> tuple[Holdings, ...]:
    """By rank, what an order holds: a micro-batch counts from the start of its F to the end of its B or W."""
    place = order.placement
    found = []
    for rank, actions in enumerate(order.ranks):
        replicas = place.replicas(rank)
        at = {replica: i for i, replica in enumerate(replicas)}
        now, states = [0] * len(replicas), set[tuple[int, ...]]()
        for action in actions:
            if action.kind in (Kind.F, Kind.B, Kind.W) and action.microbatch is not None:
                now[at[place.pipe_of[action.microbatch], action.stage]] += 1 if action.kind is Kind.F else -1
                if action.kind is Kind.F:
                    states.add(tuple(now))
        found.append(Holdings(replicas, _largest(states) or ((0,) * len(replicas),)))
    return tuple(found)


def _largest(states: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    kept: list[tuple[int, ...]] = []
    for state in sorted(states, reverse=True):  # whatever is less everywhere comes later
        if not any(all(a <= b for a, b in zip(state, other, strict=True)) for other in kept):
            kept.append(state)
    return tuple(kept)


def rank_memory(
    stages: Sequence[Stage], placement: Placement, held: Sequence[Holdings], owner: Mapping[str, int], sizes: Sizes
) -> tuple[RankMemory, ...]:
    """The bytes of every rank.

    Args:
        stages: The stages of a cut.
        placement: Where they are.
        held: From :func:`holdings`.
        owner: The stage that owns each parameter.
        sizes: Bytes by name.
    """
    return tuple(_of_rank(rank, stages, held[rank], owner, sizes) for rank in range(placement.num_ranks))


def _of_rank(rank: int, stages: Sequence[Stage], held: Holdings, owner: Mapping[str, int], sizes: Sizes) -> RankMemory:
    owned: dict[str, None] = {}
    mirrors = messages = buffers = 0
    for pipe, number in held.replicas:
        stage = stages[number]
        mine = stage.owned if pipe == 0 else ()
        owned.update(dict.fromkeys(mine))
        borrowed = [name for name in stage.parameters if pipe or owner[name] != number]
        mirrors += sum(sizes.parameters[name] + sizes.gradients.get(name, 0) for name in borrowed)
        messages += _message_bytes(stage)
        buffers += sum(sizes.buffers.get(name, 0) for name in stage.buffers)
    gradients = sum(sizes.gradients.get(name, 0) for name in owned)
    most = held.most()
    return RankMemory(
        rank=rank,
        parameters=sum(sizes.parameters[name] for name in owned) + buffers,
        gradients=gradients,
        optimizer=int(sizes.optimizer_values * gradients),
        mirrors=mirrors,
        activations=held.peak([stage.activation_bytes for stage in stages]),
        messages=messages,
        in_flight=tuple((pipe, stage, count) for (pipe, stage), count in zip(held.replicas, most, strict=True)),
        recomputation=max(stages[stage].recompute_bytes for _, stage in held.replicas),
    )


def _message_bytes(stage: Stage) -> int:
    """One micro-batch's values received ahead of time, one gradient received and one being sent."""
    ahead = sum(value.meta.bytes for value in stage.received)
    return ahead + sum(value.meta.bytes for value in (*stage.received, *stage.sent) if value.meta.requires_grad)
