"""Choose the cut of a captured model for a given order: by the simulated makespan, within the memory of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.planner.caps import readable_bytes
from fxchimera.planner.link import Measures
from fxchimera.planner.memory import Holdings, RankMemory, Sizes, holdings, rank_memory
from fxchimera.planner.pace import makespan_of
from fxchimera.planner.relief import Relief, what_was_tried
from fxchimera.planner.table import costs_of
from fxchimera.schedule.order import Order
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.fitting import Room, Share
from fxchimera_passes.plan import Load, Stage, StagePlan
from fxchimera_passes.points import Place
from fxchimera_passes.stages import Ground, make_plan

__all__ = ["Memory", "choose_cut", "sizes_of"]


def choose_cut(
    captured: Captured,
    costs: NodeCosts,
    order: Order,
    split_points: Sequence[Place],
    memory: Memory | None = None,
    measures: Measures | None = None,
    ground: Ground | None = None,
    relief: Relief | None = None,
) -> StagePlan:
    """Cut ``captured`` into the order's stages so that the order ends soonest, and no rank needs more than ``memory`` allows.

    ``ground`` is that of the recording and the costs, if it is known; ``relief`` is what stages compute again.

    Raises:
        PartitionError: The graph has too few places to cut, or no cut was found that fits.
    """
    makespan = makespan_of(order)

    def score(loads: Sequence[Load]) -> float:
        return makespan(costs_of(loads if relief is None else relief.loads(loads), measures))

    room = memory.room(relief) if memory is not None and memory.caps else None
    stages = order.placement.num_stages
    cut = make_plan(captured, costs, stages, split_points=split_points, score=score, room=room, ground=ground)
    if relief is None:
        return cut
    known = memory or Memory.of(order, sizes_of(captured))
    return relief.applied(cut, known.needed, known.caps, known.in_flight)


def sizes_of(captured: Captured, *, optimizer_values: float = 2.0) -> Sizes:
    """Return the bytes of the model's parameters, of the gradients of those that are trained, and of its buffers."""
    model = captured.model
    parameters = {name: model.get_parameter(name) for name in captured.parameters}
    return Sizes(
        parameters={name: parameter.nbytes for name, parameter in parameters.items()},
        gradients={name: parameter.nbytes for name, parameter in parameters.items() if parameter.requires_grad},
        buffers={
            name: buffer.numel() * buffer.itemsize for name, buffer in model.named_buffers()
        },  # a sparse one as if it were dense
        optimizer_values=optimizer_values,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What the ranks of an order need and may have: ``caps`` in bytes by rank, empty for no cap."""

    order: Order
    sizes: Sizes
    caps: tuple[int, ...]
    held: tuple[Holdings, ...]

    @classmethod
    def of(cls, order: Order, sizes: Sizes, caps: tuple[int, ...] = ()) -> Memory:
        """Read off the order what each rank holds in flight."""
        return cls(order, sizes, caps, holdings(order))

    def needed(self, stages: Sequence[Stage]) -> tuple[RankMemory, ...]:
        """The bytes of every rank for the stages of a cut."""
        owner = {name: stage.index for stage in stages for name in stage.owned}
        return rank_memory(stages, self.order.placement, self.held, owner, self.sizes)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """By stage, the most micro-batches of it that a rank holds at once."""
        pairs = [pair for held in self.held for pair in zip(held.replicas, held.most(), strict=True)]
        return tuple(max(n for (_, stage), n in pairs if stage == s) for s in range(self.order.placement.num_stages))

    def room(self, relief: Relief | None = None) -> Room:
        """The same for the passes, which know of stages and not of ranks; with as much recomputation as ``relief`` offers."""
        state = self.sizes.optimizer_values
        kept = 1.0 if relief is None else relief.saved

        def eased(stages: Sequence[Stage]) -> Sequence[Stage]:
            return stages if relief is None else relief.most(stages, self.in_flight)

        ranks = []
        for cap, held in zip(self.caps, self.held, strict=True):
            shares: dict[int, Share] = {}  # the middle rank of an odd number holds both copies of its stage
            for (pipe, stage), count in zip(held.replicas, held.most(), strict=True):
                known = shares.get(stage, Share(stage, 0.0, 0.0, 0.0))
                trained = known.trainable + 1.0 + (0.0 if pipe else state)
                shares[stage] = Share(stage, known.parameter + 1.0, trained, known.saved + kept * count)
            ranks.append((float(cap), tuple(shares.values())))
        return Room(
            ranks=tuple(ranks),
            excess=lambda stages: max(need.total / cap for need, cap in zip(self.needed(eased(stages)), self.caps, strict=True)),
            refusal=lambda stages: self._refusal(eased(stages), relief),
        )

    def _refusal(self, stages: Sequence[Stage], relief: Relief | None) -> str:
        needed = self.needed(stages)
        rank = max(range(len(needed)), key=lambda rank: needed[rank].total / self.caps[rank])
        need, cap = needed[rank], self.caps[rank]
        own = need.parameters + need.gradients + need.optimizer
        mirrors = f", copies of other ranks' stages {readable_bytes(need.mirrors)}" if need.mirrors else ""
        advice = ["more stages"]
        if need.activations + need.messages > 0.05 * need.total:
            advice.append("smaller micro-batches (a larger n_microbatches for the same batch)")
            advice += ['recompute="auto"'] if relief is None else []
        tried = what_was_tried(need, stages) if relief is not None else ""
        if need.mirrors:
            advice.append('a schedule with one copy of the weights ("1f1b")')
        return (
            f"no cut into {len(stages)} stages was found that fits: rank {rank} needs {readable_bytes(need.total)} "
            f"({need.total} bytes) and may have {readable_bytes(cap)} ({cap} bytes): parameters, gradients and optimizer "
            f"state {readable_bytes(own)}{mirrors}, activations {readable_bytes(need.activations)}, messages "
            f"{readable_bytes(need.messages)}{tried}. Use {', or '.join(advice)}"
        )
