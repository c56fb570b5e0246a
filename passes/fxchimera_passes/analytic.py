"""Estimate what every node of a recorded graph costs, forward and backward, in seconds.

The recording alone is read: a node takes as long as its arithmetic plus its memory traffic (a node is a whole module of
many kernels, so the two terms add up rather than overlap).  It is deterministic, so every rank finds the same numbers, and it
works for a model without weights.  Timings of real runs (``fxchimera_passes.measure``) balance better where they can be had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import CaptureError

__all__ = ["LINK_BYTES_PER_SECOND", "NodeCosts", "analytic", "backward_factors", "seconds_of"]

# An accelerator such as NVIDIA's A100 (312 Tflop/s, 2.0 TB/s, and 300 GB/s to another one each way) at two thirds of its peak; only
# the ratios matter for where a graph is cut.
_FLOPS_PER_SECOND = 2.0e14
_BYTES_PER_SECOND = 1.5e12
LINK_BYTES_PER_SECOND = 2.0e11


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """Seconds of one micro-batch by node name, forward and backward.

    ``deferrable`` are those of the backward that are for weights whose gradients can be put off; None: not known.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    deferrable: Mapping[str, float] | None = None


def analytic(
    captured: Captured, *, flops_per_second: float = _FLOPS_PER_SECOND, bytes_per_second: float = _BYTES_PER_SECOND
) -> NodeCosts:
    """Estimate every node from its floating-point operations and the bytes it moves.

    The backward costs as much as the forward for each kind of gradient a node computes: for its weights, and for its inputs.

    Raises:
        CaptureError: a rate is not positive.
    """
    if flops_per_second <= 0.0 or bytes_per_second <= 0.0:
        raise CaptureError(f"rates must be positive, got {flops_per_second} flops/s and {bytes_per_second} bytes/s")
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    factors = backward_factors(captured)
    for node in captured.graph.nodes:
        if node.op.startswith("call"):
            known = info(node)
            forward[node.name] = seconds_of(known.forward_flops, known.moved_bytes, flops_per_second, bytes_per_second)
            backward[node.name] = factors[node.name] * forward[node.name]
    return NodeCosts(forward, backward)


def seconds_of(
    flops: float, moved: float, flops_per_second: float = _FLOPS_PER_SECOND, bytes_per_second: float = _BYTES_PER_SECOND
) -> float:
    """Estimate the seconds of some floating-point operations that move some bytes."""
    return flops / flops_per_second + moved / bytes_per_second


def backward_factors(captured: Captured) -> dict[str, int]:
    """Backward over forward of every call: 0 (nothing needs a gradient), 1 or 2, by node name."""
    trainable = {name for name in captured.parameters if captured.model.get_parameter(name).requires_grad}
    needs: dict[fx.Node, bool] = {}
    factors: dict[str, int] = {}
    for node in captured.graph.nodes:
        if node.op == "output":
            break
        known = info(node)
        if not node.op.startswith("call"):
            needs[node] = known.value is not None and known.value.requires_grad
            continue
        kinds = sum(needs[source] for source in node.all_input_nodes) + (not trainable.isdisjoint(known.parameters))
        flows = known.grad_enabled and kinds > 0 and (known.value is None or known.value.requires_grad)
        needs[node] = flows
        factors[node.name] = min(kinds, 2) if flows else 0
    return factors
