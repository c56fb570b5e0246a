"""The pieces of a recorded graph between which it may be cut, with the numbers that a cut is chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.captured import Captured
from fxchimera_passes.liveness import Liveness

__all__ = ["Atoms", "Reads", "canonical_names", "contract", "parameter_bytes", "parameter_reads"]


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
        modules = captured.model.named_modules(remove_duplicate=False)
        found = {f"{path}.{name}" if path else name: p for path, m in modules for name, p in m._parameters.items() if p is not None}
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
    begins = np.zeros(len(live.nodes), np.int64)
    begins[[*live.cuttable]] = 1
    atom_of = np.cumsum(begins)
    saved, known = [0] * len(starts), set[int]()
    for i in live.carried:
        for number, size in live.known[i].saved:
            if number not in known:
                known.add(number)
                saved[atom_of[i]] += size
    reads = Reads.of(captured, live)
    owners = atom_of[[*reads.first.values()]]
    sizes = [reads.sizes[name] for name in reads.first]
    trained = [size if name in reads.trained else 0 for name, size in zip(reads.first, sizes, strict=True)]
    names = [live.nodes[i].name for i in live.carried]
    seconds = [costs.forward.get(name, 0.0) + costs.backward.get(name, 0.0) for name in names]
    return Atoms(
        starts=starts,
        seconds=tuple(np.bincount(atom_of[[*live.carried]], seconds, len(starts)).tolist()),
        parameters=tuple(np.bincount(owners, minlength=len(starts)).tolist()),
        crossing=(*[live.crossing_bytes[p] for p in starts], 0),
        parameter_bytes=_summed(len(starts), owners, sizes),
        trainable_bytes=_summed(len(starts), owners, trained),
        saved_bytes=tuple(saved),
        reads=reads,
    )


def _summed(n: int, places: npt.NDArray[np.int64], values: Sequence[int]) -> tuple[int, ...]:
    """For each of ``n`` places the sum of its values."""
    sums = np.zeros(n, np.int64)
    np.add.at(sums, places, np.array(values, np.int64))
    return tuple(sums.tolist())


def canonical_names(captured: Captured) -> dict[str, str]:
    """Every name of every parameter of the model, to its canonical name."""
    return {alias: name for name, aliases in captured.parameters.items() for alias in (name, *aliases)}


def parameter_reads(captured: Captured, live: Liveness) -> dict[int, tuple[str, ...]]:
    """Canonical names of the parameters that each carried node and the output read, inside a leaf module or as a direct argument.

    What reads none is left out.
    """
    canonical, nodes = canonical_names(captured), live.nodes
    direct = {i: canonical[str(nodes[i].target)] for i in live.attributes if nodes[i].target in canonical}
    found: dict[int, tuple[str, ...]] = {}
    for i in (*live.carried, len(nodes) - 1):
        inside, sources = live.known[i].parameters, live.inputs[i]
        if inside or (direct and not direct.keys().isdisjoint(sources)):
            found[i] = (*[canonical.get(name, name) for name in inside], *[direct[s] for s in sources if s in direct])
    return found


def parameter_bytes(captured: Captured, name: str) -> int:
    """Size of one parameter in bytes, whatever device (or none) it lives on."""
    found: torch.Tensor = captured.model.get_parameter(name)
    return found.numel() * found.element_size()
