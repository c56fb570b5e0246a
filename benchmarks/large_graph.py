"""How long a graph of 100,000 nodes takes to be cut, once the costs of its nodes are known.

    python benchmarks/large_graph.py --stages 8            one line, or --json

Seconds are processor time.  The graph is made by hand, without a forward: blocks of four calls (linear, activation, linear, sum)
with random costs, of which every tenth also adds the value of twenty blocks before.  The plan is chosen by the makespan of chimera
at N = 2D.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import time

import torch
from torch import fx, nn

from fxchimera.planner.choose import choose_cut
from fxchimera.schedule.families import make_order
from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.captured import Captured, CaptureReport, NodeInfo, TensorMeta
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.structure import flatten

_VALUE = TensorMeta((4, 256), (256, 1), torch.float32, True)
_MIXED = frozenset({"input", "parameter"})


def graph_of(nodes: int, seed: int = 0) -> tuple[Captured, NodeCosts]:
    """Make a recording of about ``nodes`` calls, and what they cost."""
    chance, blocks = random.Random(seed), nodes // 4
    model, graph = nn.Module(), fx.Graph()
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False, device="meta") for _ in range(2 * blocks))
    model.layers = layers
    source = graph.placeholder("input_0")
    source.meta["info"] = NodeInfo(value=_VALUE, depends=frozenset({"input"}))
    forward: dict[str, float] = {}
    made, value = list[fx.Node](), source

    def call(node: fx.Node, *parameters: str) -> fx.Node:
        forward[node.name] = chance.uniform(0.5, 2.0) if parameters else 0.01
        node.meta["info"] = NodeInfo(value=_VALUE, depends=_MIXED, parameters=parameters, forward_flops=1e9)
        return node

    for block in range(blocks):
        first, second = f"layers.{2 * block}", f"layers.{2 * block + 1}"
        inner = call(graph.call_module(first, (value,)), f"{first}.weight")
        inner = call(graph.call_module(second, (call(graph.call_function(torch.relu, (inner,))),)), f"{second}.weight")
        value = call(graph.call_function(operator.add, (value if block % 10 or block < 20 else made[block - 20], inner)))
        made.append(value)
    graph.output((value,))
    captured = Captured(
        graph=graph,
        model=model,
        constants={},
        in_structure=flatten(((torch.ones(1),), {}))[1],
        out_structure=flatten(torch.ones(1))[1],
        pinned=(),
        parameters={f"layers.{index}.weight": () for index in range(2 * blocks)},
        open_modules=frozenset({""}),
        guards=(),
        report=CaptureReport(),
    )
    return captured, NodeCosts(forward, {name: 2 * seconds for name, seconds in forward.items()})


def timed(captured: Captured, costs: NodeCosts, stages: int) -> tuple[float, StagePlan]:
    """Seconds of one plan, and the plan."""
    began = time.process_time()
    plan = choose_cut(captured, costs, make_order("chimera", stages, 2 * stages), ())
    return time.process_time() - began, plan


def main() -> None:
    """Print how long it took, and how even the cut is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    captured, costs = graph_of(options.nodes)
    runs = [timed(captured, costs, options.stages) for _ in range(options.repeats)]
    row = {
        "nodes": len(captured.graph.nodes),
        "stages": options.stages,
        "seconds": min(seconds for seconds, _ in runs),
        "gap": runs[0][1].gap,
    }
    print(json.dumps(row) if options.json else "{nodes} nodes, {stages} stages: {seconds:.2f} s, gap {gap:.5f}".format_map(row))


if __name__ == "__main__":
    main()
