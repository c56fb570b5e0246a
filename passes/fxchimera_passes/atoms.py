"""The pieces of a recorded graph between which it may be cut, with the numbers that a cut is chosen by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.liveness import Liveness

__all__ = ["Atoms", "Reads", "canonical_names", "contract", "parameter_bytes", "parameter_reads", "parameters_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Which parameters are read where, all by canonical name.

    ``by_node`` maps a carried node or the output to what it reads (what reads none is left out), ``first`` a parameter to the first
    that reads it.  ``sizes`` are bytes, ``trained`` those that require a gradient.
    """

    by_node: Mapping[int, tuple[str, ...]]
    first: Mapping[str, int]
    sizes: Mapping[str, int]
    trained: frozenset[str]

    @classmethod
    def of(cls, captured: Captured, live: Liveness) -> Reads:
        """Look at every node once."""
        by_node = parameter_reads(captured, live)
        first: dict[str, int] = {}
        for i, names in by_node.items():
            for name in names:
                first.setdefault(name, i)
        found = dict(captured.model.named_parameters(remove_duplicate=False))
        return cls(
            by_node=by_node,
            first=first,
            sizes={name: parameter.numel() * parameter.element_size() for name, parameter in found.items()},
            trained=frozenset(name for name, parameter in found.items() if parameter.requires_grad),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """Atom a is the nodes ``starts[a]`` to ``starts[a + 1] - 1``.

    ``seconds`` is forward plus backward of its carried nodes, ``parameters`` how many parameters it is the first to read,
    ``crossing`` the bytes that a cut before it sends (one more entry, 0, for the end).  ``parameter_bytes`` and
    ``trainable_bytes`` are of the parameters it is the first to read, ``saved_bytes`` of the memory whose first keeper it is.
    """

    starts: tuple[int, ...]
    seconds: tuple[float, ...]
    parameters: tuple[int, ...]
    crossing: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    trainable_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    reads: Reads


def contract(captured: Captured, live: Liveness, costs: NodeCosts) -> Atoms:
    """Join everything that no legal cut can part."""
    starts = (0, *live.cuttable)
    begins = [0] * len(live.nodes)
    for start in live.cuttable:
        begins[start] = 1
    atom_of = tuple(accumulate(begins))
    seconds, firsts = [0.0] * len(starts), [0] * len(starts)
    weights, trainable, saved, known = [0] * len(starts), [0] * len(starts), [0] * len(starts), set[int]()
    for i in live.carried:
        node = live.nodes[i]
        seconds[atom_of[i]] += costs.forward.get(node.name, 0.0) + costs.backward.get(node.name, 0.0)
        for number, size in info(node).saved:
            if number not in known:
                known.add(number)
                saved[atom_of[i]] += size
    reads = Reads.of(captured, live)
    for name, first in reads.first.items():
        atom, size = atom_of[first], reads.sizes[name]
        firsts[atom] += 1
        weights[atom] += size
        trainable[atom] += size if name in reads.trained else 0
    return Atoms(
        starts=starts,
        seconds=tuple(seconds),
        parameters=tuple(firsts),
        crossing=(*(live.crossing_bytes[p] for p in starts), 0),
        parameter_bytes=tuple(weights),
        trainable_bytes=tuple(trainable),
        saved_bytes=tuple(saved),
        reads=reads,
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


def parameter_reads(captured: Captured, live: Liveness) -> dict[int, tuple[str, ...]]:
    """What :func:`parameters_of` gives for every carried node and the output, those that read none left out."""
    canonical, nodes = canonical_names(captured), live.nodes
    direct = {i for i, node in enumerate(nodes) if node.op == "get_attr" and node.target in canonical}
    found: dict[int, tuple[str, ...]] = {}
    for i in (*live.carried, len(nodes) - 1):
        if direct and not direct.isdisjoint(live.inputs[i]):
            found[i] = tuple(parameters_of(captured, nodes[i], canonical))
        elif names := info(nodes[i]).parameters:
            found[i] = tuple([canonical.get(name, name) for name in names])
    return found


def parameter_bytes(captured: Captured, name: str) -> int:
    """Size of one parameter in bytes, whatever device (or none) it lives on."""
    found: torch.Tensor = captured.model.get_parameter(name)
    return found.numel() * found.element_size()
