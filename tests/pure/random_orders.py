"""Orders and costs drawn at random, for tests that compare what is proven with what runs."""

from __future__ import annotations

import random

from fxchimera.schedule import Action, Costs, Order, Placement

__all__ = ["random_costs", "random_order"]


def random_order(place: Placement, chance: random.Random, *, split: bool) -> Order:
    """The projection of a random linear order of all computations that respects the data."""
    cells = [(stage, m) for stage in range(place.num_stages) for m in range(place.n_microbatches)]
    halves = {cell for cell in cells if split and chance.random() < 0.5}
    todo = [(stage, "F", m) for stage, m in cells]
    todo += [(stage, kind, m) for stage, m in cells for kind in (("I", "W") if (stage, m) in halves else ("B",))]
    done: set[tuple[int, str, int]] = set()
    ranks: list[list[Action]] = [[] for _ in range(place.num_ranks)]

    def ready(stage: int, kind: str, m: int) -> bool:
        if kind == "F":
            return stage == 0 or (stage - 1, "F", m) in done
        if kind == "W":
            return (stage, "I", m) in done
        above = stage == place.num_stages - 1 or (stage + 1, "B", m) in done or (stage + 1, "I", m) in done
        return above and (stage, "F", m) in done

    while todo:
        item = chance.choice([item for item in todo if ready(*item)])
        todo.remove(item)
        done.add(item)
        stage, kind, m = item
        ranks[place.rank(stage, m)].append(Action.parse(f"{stage}{kind}{m}"))
    return Order("random", place, tuple(map(tuple, ranks)))


def random_costs(depth: int, chance: random.Random) -> Costs:
    forward, first, second = (tuple(chance.choice([0.0, 1.0, chance.random()]) for _ in range(depth)) for _ in range(3))
    return Costs(forward=forward, input_grad=first, weight_grad=second, latency=chance.choice([0.0, chance.random()]))
