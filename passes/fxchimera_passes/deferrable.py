"""How much of every node's backward is for weights whose gradients can wait, as ``fxchimera_passes.splittable`` tells them."""

from __future__ import annotations

from fxchimera_passes.analytic import NodeCosts, backward_factors
from fxchimera_passes.captured import Captured
from fxchimera_passes.splittable import can_wait

__all__ = ["with_deferrable"]


def with_deferrable(captured: Captured, costs: NodeCosts) -> NodeCosts:
    """Add to the costs the seconds of each node's backward that can be put off.

    A backward takes as long for the weights as for the inputs; where no input needs a gradient, all of it is for the weights.
    """
    factors = backward_factors(captured)
    deferrable = {
        node.name: costs.backward.get(node.name, 0.0) / factors[node.name]
        for node in captured.graph.nodes
        if factors.get(node.name, 0) and can_wait(captured, node)
    }
    return NodeCosts(costs.forward, costs.backward, deferrable)
