"""Explains a recording and its cut, as a compiler's report explains what it did to a function.

What was opened and closed and why; what the recording holds for (guards, and Python values among the arguments); which values
became constants; what must stay in one stage and why; what stages compute again instead of receiving it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import fx

from fxchimera_passes.captured import Assumption, Captured, CaptureReport, Guard, info
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.structure import Path, flatten

__all__ = ["BakedConstant", "Explanation", "PinnedRange", "explain"]

_SHOWN = 12  # entries of one section
_NAMED = 3  # names in one entry
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class BakedConstant:
    """A tensor or array that is no parameter, buffer or input, and that the recording keeps as it was."""

    description: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRange:
    """The nodes ``first`` to ``last``, ``count`` of them, that one stage must run, the user's lines of both, and why."""

    first: str
    last: str
    count: int
    lines: tuple[str, str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(CaptureReport):
    """A :class:`CaptureReport` with what the recording holds for and what the cut made of it; prints as a report.

    ``arguments`` maps the name of an argument that is no tensor to its value: another value is recorded once more.  ``recomputed``
    maps a node that more than one stage runs, as it needs inputs and constants only, to these stages.
    """

    operations: int = 0
    guards: tuple[Guard, ...] = ()
    assumed: tuple[Assumption, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    constants: tuple[BakedConstant, ...] = ()
    pinned: tuple[PinnedRange, ...] = ()
    recomputed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f"{len(self.opened)} modules opened, {len(self.closed)} that had to stay whole"
        parts = [f"recorded {self.operations} operations; {counts}"]
        for title, entries in self._sections():
            if entries:
                parts += ["", title, *(f"  {entry}" for entry in entries[:_SHOWN])]
                parts += [f"  and {len(entries) - _SHOWN} more"] if entries[_SHOWN:] else []
        return "\n".join(parts)

    def _sections(self) -> Iterator[tuple[str, list[str]]]:
        yield "opened: recorded by their inner calls", _grouped(self.opened)
        yield "kept whole", _grouped(self.closed)
        yield "forward changes Python state", [f"{name or 'the model'}: {', '.join(own)}" for name, own in self.stateful.items()]
        yield (
            "holds while (looked at in every micro-batch; another value is recorded once more)",
            [_at(f"{guard.description} is {_short(guard.expected)}", guard.line) for guard in self.guards],
        )
        yield (
            "assumes (checked where it is computed)",
            [_at(f"{assumption.description} is {assumption.answer}", assumption.line) for assumption in self.assumed],
        )
        yield (
            "holds for these arguments (another value is recorded once more)",
            [f"{name} = {_short(value)}" for name, value in self.arguments.items()],
        )
        yield "keeps as constants", [_at(constant.description, constant.line) for constant in self.constants]
        yield (
            "stays in one stage",
            _alike(
                _at(f"{p.first} to {p.last} ({p.count} operations): {p.reason}", " to ".join(dict.fromkeys(filter(None, p.lines))))
                for p in self.pinned
            ),
        )
        yield "computed again in each stage that needs it, instead of sent", _by_stages(self.recomputed)
        yield "notes", list(self.notes)


def explain(captured: Captured, plan: StagePlan) -> Explanation:
    """Explain a recording and how ``plan`` cuts it."""
    nodes = tuple(captured.graph.nodes)
    known = {f.name: getattr(captured.report, f.name) for f in fields(CaptureReport)}
    return Explanation(
        **known,
        operations=sum(node.op.startswith("call") for node in nodes),
        guards=captured.guards,
        assumed=captured.assumed,
        arguments=_arguments(captured),
        constants=tuple(_constants(captured, nodes)),
        pinned=tuple(_pinned(nodes[first : last + 1]) for first, last in captured.pinned),
        recomputed=_recomputed(plan),
    )


def _arguments(captured: Captured) -> dict[str, Any]:
    """The arguments that are no tensors; an object is told by what is in it."""
    found: dict[str, Any] = {}
    for path, value in captured.in_structure.constants():
        for inner, part in flatten(value, fresh=True)[1].constants():
            if len(path) > 1:  # else there are no args, or no kwargs
                found[_argument((*path, *inner))] = part
    return found


def _argument(path: Path) -> str:
    """``args[1]``, ``mask`` or ``options.factor``: the name of an argument, or of a part of one, of ``(args, kwargs)``."""
    (_, which), (_, key), *rest = path
    name = f"args[{key}]" if which == 0 else str(key)
    return name + "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in rest)


def _constants(captured: Captured, nodes: Iterable[fx.Node]) -> Iterator[BakedConstant]:
    for node in nodes:
        value = captured.constants.get(str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor):
            text = f"tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        elif isinstance(value, (np.ndarray, np.generic)):
            text = f"numpy {value.dtype}{list(value.shape)}"
        else:
            continue
        owner = info(node).module
        yield BakedConstant(description=f"{text} read in {owner or 'the model'}", line=info(node).line)


def _pinned(nodes: tuple[fx.Node, ...]) -> PinnedRange:
    first, last = nodes[0], nodes[-1]
    lines = info(first).line, info(last).line
    return PinnedRange(first=first.name, last=last.name, count=len(nodes), lines=lines, reason=_reason(nodes))


def _reason(nodes: tuple[fx.Node, ...]) -> str:
    inside = set(nodes)
    buffers = sorted({name for node in nodes for name in info(node).writes})
    if any(node.target is torch.autograd.grad for node in nodes):
        return "autograd.grad differentiates through all of it"
    if buffers:
        return f"the forward writes {_names(buffers)}"
    writer = next((node for node in nodes if info(node).mutates), None)
    if writer is not None:
        return f"{writer.name} writes into the memory of {_names(info(writer).mutates)}, which is read before and after"
    opaque = next((n for n in nodes if n.op.startswith("call") and info(n).value is None and inside & set(n.users)), None)
    return f"{opaque.name} gives a value that is no tensor" if opaque is not None else "its tensors share memory"


def _recomputed(plan: StagePlan) -> dict[str, tuple[int, ...]]:
    places: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in stage.nodes:
            places.setdefault(name, []).append(stage.index)
    return {name: tuple(stages) for name, stages in places.items() if len(stages) > 1}


def _by_stages(recomputed: Mapping[str, tuple[int, ...]]) -> list[str]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, stages in recomputed.items():
        groups.setdefault(stages, []).append(name)
    return [f"stages {', '.join(map(str, stages))}: {_names(names)}" for stages, names in sorted(groups.items())]


def _grouped(reasons: Mapping[str, str]) -> list[str]:
    """Modules that differ in a number only, and for the same reason but for numbers, are one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((_numberless(name), _numberless(reason)), []).append(name)
    return [f"{_names(name or 'the model' for name in names)}: {reasons[names[0]]}" for names in groups.values()]


def _alike(entries: Iterable[str]) -> list[str]:
    """The first of the entries that differ in numbers only, and how many more there are."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(_numberless(entry), []).append(entry)
    return [first + (f", and {len(more)} more like it" if more else "") for first, *more in groups.values()]


def _numberless(text: str) -> str:
    return re.sub(r"_?\d+", "", text)  # the first of its kind has no number


def _names(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if found[_NAMED:] else "")


def _at(text: str, line: str) -> str:
    return f"{text}  ({line})" if line else text


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (*_PLAIN, list, tuple, torch.dtype, torch.device)) else f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."
