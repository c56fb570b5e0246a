"""A recording made by ``torch.fx.symbolic_trace``: an independent front end for the tests of the passes behind the recorder."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from fxchimera_passes.captured import Captured, CaptureReport, NodeInfo, RandomKey, TensorMeta
from fxchimera_passes.structure import Structure


class _Keeper(ShapeProp):
    """Runs the graph once and notes each node's value."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.values: dict[fx.Node, Any] = {}
        self.mutates: dict[fx.Node, tuple[str, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        read = [(source, self.values[source]) for source in n.all_input_nodes if isinstance(self.values[source], Tensor)]
        before = [value._version for _, value in read]
        self.values[n] = fx.Interpreter.run_node(self, n)
        self.mutates[n] = tuple(s.name for (s, value), count in zip(read, before, strict=True) if value._version != count)
        return self.values[n]


def _size(meta: TensorMeta | None) -> int:
    return 0 if meta is None else meta.bytes


def _note(node: fx.Node, model: nn.Module, keeper: _Keeper, names: dict[str, str], owner: str) -> NodeInfo:
    value = TensorMeta.of(keeper.values[node]) if isinstance(keeper.values.get(node), Tensor) else None
    sources = [source.meta["info"] for source in node.all_input_nodes]
    depends = frozenset().union(*(source.depends for source in sources))
    parameters, buffers, writes, flops = (), (), (), 0.0
    random: tuple[RandomKey, ...] = ()
    if node.op == "placeholder":
        depends = frozenset({"input"})
    elif node.op == "get_attr":
        kind = "parameter" if node.target in names else "buffer"
        depends = frozenset({kind})
        parameters, buffers = ((names[node.target],), ()) if kind == "parameter" else ((), (node.target,))
    elif node.op == "call_module":
        module = model.get_submodule(node.target)
        parameters = tuple(names[f"{node.target}.{name}"] for name, _ in module.named_parameters())
        buffers = tuple(f"{node.target}.{name}" for name, _ in module.named_buffers())
        writes = buffers if isinstance(module, nn.BatchNorm2d) and module.training else ()
        depends |= ({"parameter"} if parameters else set()) | ({"buffer"} if buffers else set())
        if isinstance(module, nn.Dropout) and module.p and module.training:
            random, depends = (RandomKey(node.target, 0, 0),), depends | {"random"}
        flops = 2.0 * _size(value) * sum(p.numel() for p in module.parameters())
    moved = float(_size(value) + sum(_size(source.value) for source in sources))
    return NodeInfo(
        value=value, depends=depends, module=owner, random=random, parameters=parameters, buffers=buffers, writes=writes,
        mutates=keeper.mutates.get(node, ()), forward_flops=flops, moved_bytes=moved,
    )  # fmt: skip


def trace(model: nn.Module, *inputs: Tensor, pinned: tuple[tuple[int, int], ...] = ()) -> Captured:
    """Record ``model(*inputs)``; only for models that symbolic_trace can follow and that return one tensor or a tuple of them."""
    graph_module = fx.symbolic_trace(model)
    for number, node in enumerate(n for n in graph_module.graph.nodes if n.op == "placeholder"):
        node.name = node.target = f"input_{number}"
    keeper = _Keeper(graph_module)
    keeper.run(*inputs)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names = {alias: group[0] for group in aliases.values() for alias in group}
    graph = graph_module.graph
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        owner = list(stack)[-1] if stack else ""
        node.meta["info"] = _note(node, model, keeper, names, owner)
    output = next(node for node in graph.nodes if node.op == "output")
    if isinstance(output.args[0], fx.Node):
        output.args = ((output.args[0],),)
    structure = Structure(None, 1)
    return Captured(
        graph=graph, model=model, constants={}, in_structure=structure, out_structure=structure, pinned=pinned,
        parameters={group[0]: tuple(group) for group in aliases.values()}, open_modules=frozenset({""}), guards=(),
        report=CaptureReport(),
    )  # fmt: skip
