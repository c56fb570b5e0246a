"""Which nodes of a stage may run a second time, in the backward, without a trace: same result, nothing written or counted twice.

    linear  gelu  batch_norm  linear  dropout  add_  linear
    |--- run ---|     .       |------- run --------------|        batch norm writes its statistics; add_ writes what the run made

A node that is repeated finds its inputs as they were: memory that is written in place is made, written and last read inside one
run, or everything that touches it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from fxchimera_passes._torch import compiled
from fxchimera_passes.assumed import Check
from fxchimera_passes.capture.targets import rebuild
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.liveness import Liveness, buffers_read, within
from fxchimera_passes.whole import WHOLE, module_at

__all__ = ["Repeatable"]

# What hangs a hook or a flag on a tensor that may come from outside of what is repeated.
_EFFECTS = frozenset(["__set__", "requires_grad_", "register_hook", "retain_grad", "register_post_accumulate_grad_hook"])

_CACHES = frozenset(["_flat_weights", "_flat_weight_refs"])  # a recurrent layer's list of its own weights


@dataclass(frozen=True, slots=True)
class Repeatable:
    """Why nodes of a recording cannot be repeated: ``reasons`` by position, for those that cannot whatever the cut.

    ``compiled`` are the calls that run compiled code: it cannot be repeated in part.
    """

    live: Liveness
    reasons: Mapping[int, str]
    compiled: frozenset[int]

    @classmethod
    def of(cls, captured: Captured, live: Liveness) -> Repeatable:
        """Look at every call once."""
        calls = [i for i, node in enumerate(live.nodes) if node.op.startswith("call")]
        dirty = {name for i in calls for name in live.known[i].writes}
        found = ((i, _reason(captured, live, i, dirty)) for i in calls)
        modules = {i: module_at(captured.model, str(live.nodes[i].target)) for i in calls if live.nodes[i].op == "call_module"}
        opaque = frozenset(i for i, module in modules.items() if any(map(_compiled, module.modules())))
        return cls(live, {i: reason for i, reason in found if reason}, opaque)

    def runs(self, nodes: Sequence[int], *, whole: bool) -> tuple[tuple[tuple[int, ...], ...], dict[int, str]]:
        """The longest runs of ``nodes``, those of a stage in order, that may be repeated; and why the others may not.

        Without ``whole`` the dear results inside a node are kept, so that it is repeated in part.
        """
        left = {i: "is compiled, so that it cannot be run again in part" for i in nodes if i in self.compiled and not whole}
        left |= {i: self.reasons[i] for i in nodes if i in self.reasons}
        writers = [i for i in nodes if self.live.known[i].mutates and not self._writes_state(i)]
        near, inside = (self._near(nodes) if writers else {}), set(nodes)
        places = [(writer, self._touching(writer, inside, near)) for writer in writers]
        while True:
            runs = _runs(nodes, left)
            where = {i: number for number, run in enumerate(runs) for i in run}
            torn = {
                i: f"shares memory that {self.live.nodes[m].name} writes" if i != m else "writes memory that is read elsewhere"
                for m, touching in places
                if len({where.get(i, -1) for i in touching}) > 1 or -1 in touching
                for i in touching
                if i in where
            }
            if not torn:
                return runs, left
            left |= torn

    def _near(self, nodes: Sequence[int]) -> dict[int, set[int]]:
        """By piece of memory, -1 for all that is not counted: the nodes that make or read it."""
        near: dict[int, set[int]] = {}
        for i in nodes:
            for s in (i, *self.live.inputs[i]):
                if self.live.known[s].value is not None and not self._is_parameter(s):
                    near.setdefault(self.live.known[s].memory, set()).add(i)
            for number, _ in self.live.known[i].dear:
                near.setdefault(number, set()).add(i)
        return near

    def _touching(self, writer: int, inside: set[int], near: Mapping[int, set[int]]) -> set[int]:
        """The nodes that make, write or read the memory that ``writer`` writes; -1 stands for a maker that is not ``inside``."""
        live, names = self.live, info(self.live.nodes[writer]).mutates
        targets = {s for s in live.inputs[writer] if live.nodes[s].name in names}
        targets.update(s for t in targets if live.nodes[t].target is rebuild for s in live.inputs[t])
        numbers = {live.known[target].memory for target in targets}
        known = numbers and targets <= inside and -1 not in numbers
        return {writer, *(() if known else (-1,))}.union(*(near.get(number, set()) for number in numbers))

    def _writes_state(self, writer: int) -> bool:
        """Whether a node writes nothing but buffers: their readers are left out anyhow."""
        live = self.live
        targets = [s for s in live.inputs[writer] if live.nodes[s].name in live.known[writer].mutates]
        return all(live.nodes[target].op == "get_attr" and live.known[target].buffers for target in targets)

    def _is_parameter(self, i: int) -> bool:
        return self.live.nodes[i].op == "get_attr" and bool(self.live.known[i].parameters)


def _compiled(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or compiled(module)


def _runs(nodes: Sequence[int], left: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[]]
    for i in nodes:
        if i not in left:
            found[-1].append(i)
        elif found[-1]:
            found.append([])
    return tuple(tuple(run) for run in found if run)


def _reason(captured: Captured, live: Liveness, i: int, dirty: set[str]) -> str:
    """Why node ``i`` cannot be repeated, "" when it can."""
    node, known = live.nodes[i], live.known[i]
    if known.writes:
        return f"writes {_names(known.writes)}"
    if dirty and (read := dirty & buffers_read(node)):
        return f"reads {_names(sorted(read))}, which the forward writes"
    if node.op == "call_module":
        target = str(node.target)
        changing = (path for path, names in captured.report.stateful.items() if not _CACHES.issuperset(names))
        stateful = [path for path in changing if target == WHOLE or within(path, target)]
        if stateful:
            return f"changes Python state of {stateful[0] or 'the model'}"
    if not known.hookable:
        return "runs a torch.func transform, which refuses saved-tensor hooks"
    if isinstance(node.target, Check):
        return "checks an answer that the recording took for granted"
    if node.target is torch.autograd.grad:
        return "differentiates inside the forward"
    return f"is {_name(node)}(), which sets something on a tensor" if _name(node) in _EFFECTS else ""


def _name(node: fx.Node) -> str:
    return node.target if node.op == "call_method" else str(getattr(node.target, "__name__", ""))  # type: ignore[return-value]


def _names(names: Iterable[str]) -> str:
    first, *more = names
    return first + (f" and {len(more)} more" if more else "")
