"""Write one graph per stage: values come in from the stage before, go out to the stage after.

    forward(*received, *inputs) -> sent            the last stage returns the model's output tensors

A stage's graph calls the user's own modules; binding it to a model makes a module out of it.  A value that only passes through is
returned as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxchimera_passes.captured import Captured, TensorMeta, info
from fxchimera_passes.inplace import overwritten
from fxchimera_passes.plan import NONE, Stage, StagePlan
from fxchimera_passes.recomputation import Recomputation
from fxchimera_passes.regions import Wrap, enclose
from fxchimera_passes.scope import call_in_scope, scope_of
from fxchimera_passes.soundness import watched
from fxchimera_passes.whole import module_at

__all__ = ["StageGraph", "placed", "split", "stand_in"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """The graph of one stage.

    ``constants`` are the recording's constants that the graph reads, by attribute name.  ``modules`` are the qualified names of the
    leaf modules that it calls, ``attributes`` those of the parameters and buffers that it reads itself.  ``regions`` are the names
    of the nodes that are run again in the backward, region by region.  ``device`` is where the recording's tensors live.
    """

    stage: Stage
    graph: fx.Graph
    constants: Mapping[str, Any]
    modules: tuple[str, ...]
    attributes: tuple[str, ...]
    regions: tuple[tuple[str, ...], ...] = ()
    device: torch.device = _CPU

    def bind(self, root: nn.Module, *, device: torch.device | None = None, again: Wrap | None = None) -> fx.GraphModule:
        """Make a module that runs the graph on ``root``'s own submodules, parameters and buffers.

        ``root`` is the recorded model or a clone of it.  With ``device`` the constants go there, and so does what was recorded with
        an explicit device of the recording's kind.  ``again`` makes of a region what runs it again in the backward; without it
        nothing is.
        """
        holder = placed(nn.Module(), self, root)
        holder.training = root.training
        for name, value in self.constants.items():
            _place(holder, name, value.to(device) if device is not None and isinstance(value, torch.Tensor) else value)
        graph = fx.Graph()
        output = graph.graph_copy(self.graph, {})
        graph.output(output)
        for old, new in zip(self.graph.nodes, graph.nodes, strict=True):
            new.meta = dict(old.meta)
            if device is not None:
                new.args, new.kwargs = _on_device((new.args, new.kwargs), self.device.type, device)
        place = {old.name: new for old, new in zip(self.graph.nodes, graph.nodes, strict=True)}
        check = watched(self.stage.index, len(self.stage.received), holder, graph)
        for number, names in enumerate(self.regions if again is not None else ()):
            assert again is not None
            enclose(holder, graph, [place[name] for name in names], f"<region {number}>", again)
        return check(fx.GraphModule(holder, graph, class_name=f"Stage{self.stage.index}"))


def placed(holder: nn.Module, graph: StageGraph, root: nn.Module) -> nn.Module:
    """Hang what a stage reads of ``root`` into ``holder``, under its own names; returns ``holder``."""
    for name in graph.modules:
        _place(holder, name, module_at(root, name))
    for name in graph.attributes:
        if not any(name.startswith(f"{module}.") for module in graph.modules):
            _place(holder, name, _attribute(root, name))
    return holder


def split(captured: Captured, plan: StagePlan) -> tuple[StageGraph, ...]:
    """Write the graph of every stage of ``plan``, first to last."""
    last = len(plan.stages) - 1
    again = Recomputation.of(captured) if any(stage.recompute != NONE for stage in plan.stages) else None
    return tuple(_Writer(captured, stage, stage.index == last, again).write() for stage in plan.stages)


def stand_in(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape and dtype on the device of ``like`` that holds no memory, for a reader of shapes alone."""
    return torch.zeros((), dtype=dtype, device=like.device).expand(shape)


class _Writer:
    """Writes one stage; ``env`` maps recorded nodes to the stage's own."""

    def __init__(self, captured: Captured, stage: Stage, is_last: bool, again: Recomputation | None) -> None:
        self.captured, self.stage, self.is_last, self.again = captured, stage, is_last, again
        self.nodes = {node.name: node for node in captured.graph.nodes}
        self.run = [self.nodes[name] for name in stage.nodes]
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        self.modules: dict[str, None] = {}
        self.attributes: dict[str, None] = {}

    def write(self) -> StageGraph:
        """Placeholders, then the nodes in graph order, then the output."""
        placeholders = self._placeholders()
        passed_on = dict(self.env)
        self._copy_written(placeholders)
        for node in self.run:
            self._operation(node)
        self.graph.output(self._results(passed_on))
        self.graph.lint()
        return StageGraph(
            stage=self.stage,
            graph=self.graph,
            constants=self.constants,
            modules=tuple(self.modules),
            attributes=tuple(self.attributes),
            regions=self._regions(),
            device=self.captured.device,
        )

    def _regions(self) -> tuple[tuple[str, ...], ...]:
        found = self.again.regions(self.stage, self.stage.recompute) if self.again is not None else ()
        nodes = list(self.nodes.values())
        return tuple(tuple(self.env[nodes[i]].name for i in region) for region in found)

    def _placeholders(self) -> list[fx.Node]:
        inputs = [node for node in self.captured.graph.nodes if node.op == "placeholder"]
        wanted = [self.nodes[value.name] for value in self.stage.received] + [inputs[k] for k in self.stage.inputs]
        for node in wanted:
            self.env[node] = self._keep(node, self.graph.create_node("placeholder", node.name, name=node.name))
        return wanted

    def _copy_written(self, arrived: list[fx.Node]) -> None:
        """What arrives is a leaf of autograd or the user's batch: hand writers a copy of it."""
        for node in overwritten(arrived, self.run, self.captured.model):
            self.env[node] = self._keep(node, self.graph.call_method("clone", (self.env[node],)))

    def _operation(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        scope = scope_of(info(node), self.captured.grad_enabled)
        if node.op == "call_module":
            self.modules[str(node.target)] = None
        if scope is None:
            made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        else:
            setting = self._constant(f"scope_of_{node.name}", scope)
            made = self.graph.create_node(
                "call_function", call_in_scope, (setting, self._callable(node), *args), kwargs, name=node.name
            )
        self.env[node] = self._keep(node, made)

    def _callable(self, node: fx.Node) -> fx.Node:
        """What ``call_in_scope`` is to call for ``node``; generated code can name it as an attribute only."""
        if node.op == "call_module":
            return self.graph.create_node("get_attr", str(node.target))
        # ``x.name(...)`` is ``type(x).name(x, ...)``; every recorded method is one of torch.Tensor's
        function = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        return self._constant(f"function_of_{node.name}", function)

    def _argument(self, node: fx.Node) -> fx.Node:
        if node in self.env:
            return self.env[node]
        if node.op == "get_attr":
            self.env[node] = self._keep(node, self._attribute(str(node.target)))
            return self.env[node]
        value = info(node).value
        if value is None:
            raise AssertionError(f"stage {self.stage.index} reads {node.name!r}, which the plan does not bring there")
        self.env[node] = self._keep(node, self._stand_in(value))
        return self.env[node]

    def _attribute(self, name: str) -> fx.Node:
        if name in self.captured.constants:
            return self._constant(name, self.captured.constants[name])
        self.attributes[name] = None
        return self.graph.create_node("get_attr", name)

    def _constant(self, name: str, value: Any) -> fx.Node:
        self.constants[name] = value
        return self.graph.create_node("get_attr", name)

    def _stand_in(self, value: TensorMeta) -> fx.Node:
        like = next(node for node in self.graph.nodes if node.op == "placeholder")
        return self.graph.call_function(stand_in, (like, value.shape, value.dtype))

    def _results(self, passed_on: Mapping[fx.Node, fx.Node]) -> Any:
        if self.is_last:
            output = next(node for node in reversed(self.captured.graph.nodes) if node.op == "output")
            return fx.map_arg(output.args[0], self._argument)
        sent = [self.nodes[value.name] for value in self.stage.sent]
        return tuple(passed_on.get(node, self.env[node]) for node in sent)

    @staticmethod
    def _keep(old: fx.Node, new: fx.Node) -> fx.Node:
        new.meta["info"] = info(old)
        return new


def _place(holder: nn.Module, name: str, value: Any) -> None:
    """Hang ``value`` under its dotted name, through empty modules."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(holder, part):
            holder.add_module(part, nn.Module())
        holder = getattr(holder, part)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        holder.register_buffer(last, value)
    else:
        setattr(holder, last, value)


def _attribute(root: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(root.get_submodule(path), last)


def _on_device(arguments: Any, kind: str, device: torch.device) -> Any:
    """Put ``device`` in the place of devices of this kind; others, most often the CPU, are meant as they are."""

    def placed(value: Any) -> Any:
        named = isinstance(value, str) and (value == kind or value.startswith(f"{kind}:"))
        return device if named or (isinstance(value, torch.device) and value.type == kind) else value

    return fx.node.map_aggregate(arguments, placed)
