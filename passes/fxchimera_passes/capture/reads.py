"""Reading a tensor's value into Python: ``if mask.all():``, ``int(lengths.max())``, ``x.tolist()``.

The recording follows one answer.  A value that depends on the inputs only becomes a guard, computed again from every batch; so does
one that is drawn at random, because the keyed randomness of a micro-batch is known before it runs; one that depends on nothing is
always the same.  A yes or no, or an integer, that depends on parameters or buffers is assumed, and a node checks it in every run;
any other such value cannot be recorded here, and the module that reads it has to stay whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxchimera_passes._torch import real_values
from fxchimera_passes.assumed import Check
from fxchimera_passes.capture.drawn import Drawn
from fxchimera_passes.capture.interpret import GraphInterpreter
from fxchimera_passes.capture.lines import in_distributions, user_line
from fxchimera_passes.capture.partly import stand_ins
from fxchimera_passes.capture.paths import MOST_READS, UNKNOWN, Guesses, Path, answer_kind
from fxchimera_passes.capture.signals import NeedClose
from fxchimera_passes.capture.writer import GraphWriter
from fxchimera_passes.captured import Answer, Guard, info
from fxchimera_passes.keyed import named_microbatch

__all__ = ["READS", "Reads"]

READS = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__"),
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
    )
)
"""Names of the torch functions that turn tensors into Python values."""

_EVEN = frozenset(["rand", "rand_like", "uniform_"])


@dataclass(frozen=True, slots=True)
class _Replay:
    """Computes one read again from input tensors: ``function`` of what ``graph`` returns."""

    function: Callable[..., Any]
    graph: fx.Graph
    model: nn.Module
    constants: Mapping[str, Any]
    clone: bool

    def value(self, inputs: tuple[Tensor, ...], lean: float | None = None) -> Any:
        given = [tensor.detach().clone() for tensor in inputs] if self.clone else list(inputs)
        runner = GraphInterpreter if lean is None else functools.partial(_Leaning, lean)
        with torch.no_grad(), named_microbatch():
            args, kwargs = runner(self.model, self.graph, self.constants).run(*given)
            return self.function(*args, **kwargs)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        return _comparable(self.value(inputs))


@dataclass(frozen=True, slots=True)
class _Answer:
    """Asks ``question`` of a read's value."""

    replay: _Replay
    question: Callable[[float], Any]

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        return self.question(self.replay.value(inputs))


class _Leaning(GraphInterpreter):
    """Draws ``lean`` wherever a number between 0 and 1 is drawn."""

    def __init__(self, lean: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lean = lean

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; an even draw gives the same number everywhere."""
        value = super().run_node(n)
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        return torch.full_like(value, self.lean) if name in _EVEN and isinstance(value, Tensor) else value


def _comparable(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


class Reads:
    """The rule for one recording; ``real_inputs`` are the caller's own tensors in placeholder order.

    With ``lean`` every even draw between 0 and 1 that is read gives this number; ``drew`` tells that random values were read.
    ``path`` tells the answers that depend on parameters, if the opened module that asks is one which ``may_assume`` names.
    """

    def __init__(
        self,
        writer: GraphWriter,
        model: nn.Module,
        real_inputs: Sequence[Tensor],
        lean: float | None = None,
        *,
        path: Path = UNKNOWN,
        may_assume: Callable[[str], bool] = bool,
    ) -> None:
        self.writer, self.model, self.lean = writer, model, lean
        self.real_inputs = tuple(real_inputs)
        self.guesses, self.may_assume = Guesses(path), may_assume
        self.guards: list[Guard] = []
        self.drew = False

    def read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the real value of ``function(*args, **kwargs)`` and note what it hangs on."""
        if in_distributions() and getattr(function, "__name__", "") == "__bool__":
            return True  # it checks its arguments, which a recording leaves out
        name, line, inside = getattr(function, "__name__", "read").strip("_"), user_line(), self.writer.frames.opened
        arguments = (self.writer.convert(args), self.writer.convert(dict(kwargs)))
        depends = self.writer.depends(arguments)
        if depends - {"input", "random"}:
            kind = answer_kind(function, args)
            assumes = kind is not None and self.may_assume(inside.name)
            if kind is not None and assumes and not self.guesses.endless:
                return self._assume(function, arguments, kind, f"{name}() in {type(inside.module).__name__}", line)
            reason = f"{name}() reads a value that depends on {' and '.join(sorted(depends))}"
            if assumes:
                reason += f", and after {MOST_READS} such reads the forward has not ended"
            raise NeedClose(inside.module, reason, line)
        if "input" in depends and any(tensor.is_meta for tensor in self.real_inputs):
            raise NeedClose(inside.module, f"{name}() reads an input's value, but the example inputs are meta tensors", line)
        replay = self.replay(function, arguments, {})
        with real_values():
            value = replay.value(self.real_inputs, self.lean)
        text = f"{name}() in {type(inside.module).__name__}"
        if "random" in depends:
            self.drew = True
            if name == "item" and type(value) is float:  # float(x) would make a plain number of it
                return Drawn(value, lambda question: self._asked(replay, value, question, text, line))
        if depends:
            self.guards.append(Guard(description=text, line=line, expected=_comparable(value), evaluate=replay))
        return value

    def _assume(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], kind: type[bool] | type[int], text: str, line: str
    ) -> Answer:
        """Take the next answer, and check it as soon as it can be computed."""
        writer = self.writer
        assumption = self.guesses.take(kind, text, line)
        operands: list[fx.Node] = []
        fx.map_arg(arguments, operands.append)
        latest = max(operands, key=writer.order.__getitem__)
        writes = [write for node in operands for write in writer.writes_to.get(writer.storage.get(node), ())]
        if any(writer.order[write] > writer.order[latest] for write in writes):  # there the operand was another value
            node = writer.graph.call_function(Check(function, assumption), *arguments)
            writer.add(node, depends=writer.depends(arguments))
        else:
            with writer.graph.inserting_after(latest):
                node = writer.graph.call_function(Check(function, assumption), *arguments)
            writer.add(node, depends=writer.depends(arguments))
            writer.order[node] = writer.order[latest]
            writer.pins.append((writer.order[latest], writer.order[latest]))
        writer.keep_alive.add(node)
        return assumption.answer

    def guard(self, description: str, evaluate: Callable[[tuple[Tensor, ...]], Any]) -> None:
        """Let the recording hold for what ``evaluate`` gives now."""
        with real_values():
            expected = evaluate(self.real_inputs)
        self.guards.append(Guard(description=description, line=user_line(), expected=expected, evaluate=evaluate))

    def _asked(self, replay: _Replay, value: float, question: Callable[[float], Any], text: str, line: str) -> None:
        answer = _Answer(replay, question)
        self.guards.append(Guard(description=text, line=line, expected=question(value), evaluate=answer))

    def readable(self, value: Any) -> bool:
        """Tell whether the value of a tensor that was recorded depends on the inputs alone, and they have values."""
        if not isinstance(value, Tensor) or any(tensor.is_meta for tensor in self.real_inputs):
            return False
        node = self.writer.known(value)
        return node is not None and not self.writer.depends(node) - {"input"}

    def replay(self, function: Callable[..., Any], arguments: Any, filled: Mapping[fx.Node, int]) -> _Replay:
        """Prepare to compute ``function`` of the nodes in ``arguments``; those in ``filled`` are tensors full of that number."""
        filled = {**stand_ins(arguments), **filled}
        needed = self._needed(arguments, filled)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.writer.graph.nodes:
            if node in filled:
                value = info(node).value
                assert value is not None
                copies[node] = graph.call_function(torch.full, (value.shape, filled[node]), {"dtype": value.dtype})
            elif node in needed or node.op == "placeholder":
                copy = graph.node_copy(node, copies.__getitem__)
                copy.args, copy.kwargs = self._on_host(copy.args), self._on_host(copy.kwargs)
                copies[node] = copy
        graph.output(fx.map_arg(arguments, copies.__getitem__))
        clone = any(node in self.writer.keep_alive for node in needed)
        return _Replay(function, graph, self.model, self.writer.constants, clone)

    def known_value(self, tensor: Tensor) -> Tensor | None:
        """Return the real value of a recorded tensor that depends on the inputs alone, None for any other."""
        node = self.writer.known(tensor) if self.readable(tensor) else None
        if node is None or not self.writer.depends(node):
            return None
        found: Tensor = self.replay(lambda value: value, ((node,), {}), {}).value(self.real_inputs)
        return found

    def _needed(self, arguments: Any, filled: Collection[fx.Node]) -> set[fx.Node]:
        """Collect the nodes that ``arguments`` are computed from, writes to their memory included."""
        todo: list[fx.Node] = []
        fx.map_arg(arguments, todo.append)
        needed: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node not in needed and node not in filled:
                needed.add(node)
                todo += node.all_input_nodes
                todo += self.writer.writes_to.get(self.writer.storage.get(node), [])
        return needed

    def _on_host(self, argument: Any) -> Any:
        """Compute where the real inputs are, not on the device recorded for."""
        host = self.real_inputs[0].device if self.real_inputs else torch.device("cpu")
        return fx.node.map_aggregate(argument, lambda a: host if isinstance(a, torch.device) else a)
