"""The pieces of a recorded graph between which it may be cut, with the numbers that a cut is chosen by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.liveness import Liveness

__all__ = ["Atoms", "canonical_names", "contract", "parameter_bytes", "parameter_readers", "parameters_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """Atom a is the nodes ``starts[a]`` to ``starts[a + 1] - 1``.

    ``seconds`` is forward plus backward of its carried nodes, ``parameters`` how many parameters it is the first to read,
    ``crossing`` the bytes that a cut before it sends (one more entry, 0, for the end).
    """

    starts: tuple[int, ...]
    seconds: tuple[float, ...]
    parameters: tuple[int, ...]
    crossing: tuple[int, ...]


def contract(captured: Captured, live: Liveness, costs: NodeCosts) -> Atoms:
    """Join everything that no legal cut can part."""
    starts = (0, *live.cuttable)
    seconds, firsts = [0.0] * len(starts), [0] * len(starts)
    for i in live.carried:
        name = live.nodes[i].name
        seconds[bisect_right(starts, i) - 1] += costs.forward.get(name, 0.0) + costs.backward.get(name, 0.0)
    for first in parameter_readers(captured, live).values():
        firsts[bisect_right(starts, first) - 1] += 1
    return Atoms(
        starts=starts,
        seconds=tuple(seconds),
        parameters=tuple(firsts),
        crossing=(*(live.crossing_bytes[p] for p in starts), 0),
    )


def parameters_of(captured: Captured, node: fx.Node, canonical: Mapping[str, str]) -> Iterator[str]:
    """Canonical names of the parameters that ``node`` reads, inside a leaf module or as a direct argument."""
    if node.op != "output":
        yield from (canonical.get(name, name) for name in info(node).parameters)
    for source in node.all_input_nodes:
        if source.op == "get_attr" and source.target in canonical:
            yield canonical[str(source.target)]


def canonical_names(captured: Captured) -> dict[str, str]:
    """Every name of every parameter of the model, to its canonical name."""
    return {alias: name for name, aliases in captured.parameters.items() for alias in (name, *aliases)}


def parameter_readers(captured: Captured, live: Liveness) -> dict[str, int]:
    """The first carried node (or the output) that reads each parameter, by canonical name."""
    canonical = canonical_names(captured)
    first: dict[str, int] = {}
    for i in (*live.carried, len(live.nodes) - 1):
        for name in parameters_of(captured, live.nodes[i], canonical):
            first.setdefault(name, i)
    return first


def parameter_bytes(captured: Captured, name: str) -> int:
    """Size of one parameter in bytes, whatever device (or none) it lives on."""
    found: torch.Tensor = captured.model.get_parameter(name)
    return found.numel() * found.element_size()
