"""Make one call of each region of a stage's graph, so that something else may run it: now, and again in the backward.

``h -> linear -> gelu -> linear -> y`` becomes ``h -> region 0 -> y``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem

from torch import fx, nn

__all__ = ["Wrap", "enclose"]

Wrap = Callable[[fx.GraphModule], nn.Module]


def enclose(holder: nn.Module, graph: fx.Graph, region: Sequence[fx.Node], name: str, wrap: Wrap) -> None:
    """Replace ``region``, nodes of ``graph`` in its order, by a call of ``wrap(a module that runs them)``, put into ``holder``.

    The module takes the values from outside as arguments and returns the tuple of those that are read outside.
    """
    inside = set(region)
    sources = dict.fromkeys(source for node in region for source in node.all_input_nodes if source not in inside)
    entering = [source for source in sources if source.op != "get_attr"]
    leaving = [node for node in region if any(user not in inside for user in node.users)]
    body = fx.Graph()
    env = {source: body.placeholder(source.name) for source in entering}
    env |= {source: body.get_attr(str(source.target)) for source in sources if source.op == "get_attr"}
    for node in region:
        env[node] = body.node_copy(node, env.__getitem__)
    body.output(tuple(env[node] for node in leaving))
    holder.add_module(name, wrap(fx.GraphModule(holder, body, class_name="Region")))
    with graph.inserting_after(region[-1]):
        call = graph.call_module(name, tuple(entering))
    with graph.inserting_after(call):
        for number, node in reversed(list(enumerate(leaving))):
            result = graph.call_function(getitem, (call, number))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)
