"""What to do when a model has too few pieces for the stages asked for.

    pieces with work        a   b   c         4 stages asked for
    stages              -   a   b   c         the first computes nothing

A stage must own a parameter, because optimizers refuse an empty list.  One that reads none of its own is lent one that another
stage uses: its owner keeps the value and the optimizer state, the user is a mirror, as for any tied parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxchimera_passes.atoms import Atoms, parameter_bytes, parameter_reads
from fxchimera_passes.balance import cut, most_parts
from fxchimera_passes.capture.opening import obstacle
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.liveness import Liveness
from fxchimera_passes.whole import WHOLE, module_at

__all__ = ["Division", "divide", "lend", "shortage"]


# What is lent has a mirror, whose exchange takes time in each step: a heaviest stage so much lighter is worth it.
_WORTH_LENDING = 1.25
_MANY = 20_000  # of so many pieces enough read a parameter first


@dataclass(frozen=True, slots=True)
class Division:
    """How many stages compute, how many before them do not, and (per atom) what each that computes must hold at least one of."""

    parts: int
    empty: int
    counts: tuple[int, ...]


def divide(captured: Captured, atoms: Atoms, num_stages: int) -> Division:
    """Ask that every stage owns a parameter that it reads; if that cannot be, that it has work; if not even that, leave some empty.

    Work is enough too where a shared module, called by several stages, makes the first rule's cut much worse than it has to be.
    The empty ones come first: nothing is sent to or from them, and the last stages hold the fewest micro-batches at a time.

    Raises:
        PartitionError: the model has fewer parameters than stages.
    """
    owning = most_parts(len(atoms.starts), counts=atoms.parameters)
    if num_stages > 1 and len(captured.parameters) < num_stages:
        raise PartitionError(
            f"{num_stages} stages were asked for, but the model has {len(captured.parameters)} parameters, and every stage must "
            f"own one. Use num_stages={max(owning, 1)} or fewer: into so many pieces with parameters it can be cut"
        )
    work = tuple(int(s > 0.0 or p > 0) for s, p in zip(atoms.seconds, atoms.parameters, strict=True))
    work = work if any(work) else (1,) * len(work)
    if owning >= num_stages:
        lopsided = num_stages > 1 and len(work) <= _MANY and _price(atoms, num_stages, work) > _WORTH_LENDING
        return Division(num_stages, 0, work if lopsided else atoms.parameters)
    parts = min(num_stages, most_parts(len(work), counts=work))
    return Division(parts, num_stages - parts, work)


def _price(atoms: Atoms, num_stages: int, work: Sequence[int]) -> float:
    """How much heavier the heaviest stage is when every stage must read a parameter first."""
    owning = cut(atoms.seconds, num_stages, counts=atoms.parameters).bound
    least = max(sum(atoms.seconds) / num_stages, *atoms.seconds)
    if owning <= _WORTH_LENDING * least:
        return 1.0
    return owning / cut(atoms.seconds, num_stages, counts=work).bound


def lend(captured: Captured, live: Liveness, positions: Sequence[int], owner: dict[str, int]) -> dict[str, int]:
    """Give every stage that would own no parameter one that another stage can spare.

    A tied parameter goes to its other reader; else the stage that owns the most lends its smallest.

    Raises:
        PartitionError: there are fewer parameters than stages.
    """
    lacking = sorted(set(range(len(positions) + 1)) - set(owner.values())) if positions else []
    if not lacking:
        return owner
    readers: dict[str, set[int]] = {}
    for i, names in parameter_reads(captured, live).items():
        for name in names:
            readers.setdefault(name, set()).add(bisect_right(positions, i))
    lent = dict(owner)
    for stage in lacking:
        lent[_loan(captured, lent, stage, [name for name, stages in readers.items() if stage in stages])] = stage
    return lent


def _loan(captured: Captured, owner: Mapping[str, int], stage: int, read: Iterable[str]) -> str:
    """Choose the parameter that ``stage``, which reads ``read``, gets: a small one, and one that is trained if there is any."""
    owned: dict[int, list[str]] = {}
    for name, where in owner.items():
        owned.setdefault(where, []).append(name)
    tied = [name for name in read if len(owned[owner[name]]) > 1 and name not in captured.beside]
    groups = [names for names in owned.values() if len(names) > 1 and not captured.beside.keys() >= set(names)]
    spare = tied or max(groups, key=len, default=[])
    if not spare:
        raise PartitionError(
            f"stage {stage} would own no parameter: the model has {len(owner)}, and no stage can spare one of its own. Use "
            f"num_stages={len(owner)} or fewer"
        )
    kept = captured.beside  # what another path through the model reads stays in its stage

    def price(name: str) -> tuple[bool, int]:
        return not captured.model.get_parameter(name).requires_grad, parameter_bytes(captured, name)

    return min((name for name in spare if name not in kept), key=price)


def shortage(captured: Captured, live: Liveness, atoms: Atoms, division: Division) -> str:
    """Say that some stages compute nothing, which piece could not be cut and why, and what to do."""
    asked, parts = division.parts + division.empty, division.parts
    heaviest = max(range(len(atoms.seconds)), key=atoms.seconds.__getitem__)
    ends = (*atoms.starts[1:], len(live.nodes))
    inside = [i for i in live.carried if atoms.starts[heaviest] <= i < ends[heaviest]]
    found, advice = _reason(captured, live, inside)
    idle = "1 stage computes nothing" if division.empty == 1 else f"{division.empty} stages compute nothing"
    pieces = "1 piece" if parts == 1 else f"{parts} pieces"
    share = f" ({atoms.seconds[heaviest] / (sum(atoms.seconds) or 1.0):.0%} of the work)" if parts > 1 else ""
    return (
        f"{asked} stages were asked for, but the model is cut into {pieces} only, so {idle}. What cannot be cut is {found}{share}. "
        f"Use num_stages={parts}{' or fewer' if parts > 1 else ''}, or {advice}."
    )


def _reason(captured: Captured, live: Liveness, inside: Sequence[int]) -> tuple[str, str]:
    """What keeps the nodes ``inside`` together, and what the user could change."""
    working = [live.nodes[i] for i in inside if not _reads_result(live.nodes[i])]
    if len(working) == 1:
        return _single(captured, working[0])
    spans = [(low, high) for low, high in live.pinned if inside[0] <= low and high <= inside[-1]]
    spans += [(i, live.last_use[i]) for i in inside if live.last_use[i] > i and info(live.nodes[i]).value is None]
    low, high = max(spans, key=lambda span: span[1] - span[0], default=(inside[0], inside[-1]))
    high = min(high, inside[-1])
    text = f"what runs from {_place(live.nodes[low])} to {_place(live.nodes[high])}"
    return (
        f"{text}, which shares memory, state or a value that is no tensor",
        "move part of it into modules that pass tensors to each other",
    )


def _single(captured: Captured, node: fx.Node) -> tuple[str, str]:
    if node.op != "call_module":
        return f"one operation, {_place(node)}", "split it"
    target, module = str(node.target), module_at(captured.model, str(node.target))
    if target == WHOLE:
        text = f"the forward of {type(module).__name__} itself, which is recorded as one call: {captured.report.closed['']}"
        advice = "move the branch or the computation around this line into a submodule, which is kept as one call"
        changed = [name for names in captured.report.stateful.values() for name in names]
        return text, advice + (f" (what it sets, {', '.join(changed)}, is set on a copy of the model)" if changed else "")
    why = captured.report.closed.get(target) or obstacle(module)
    why = why or ("" if next(module.children(), None) is not None else "it has no submodules")
    return f"the module {target!r} ({type(module).__name__}){f': {why}' if why else ''}", "split that module"


def _reads_result(node: fx.Node) -> bool:
    """Whether ``node`` only takes a part out of what another node returned."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in ("getitem", "getattr")


def _place(node: fx.Node) -> str:
    line = info(node).line
    return f"{node.name!r} (at {line})" if line else repr(node.name)
