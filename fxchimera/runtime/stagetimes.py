"""How long F, B, I and W of each stage take on this machine: what the choice of order and of cuts is made from.

Each stage runs by itself on what the stage before sent, whole and split in turns, so that a busy moment slows both alike.  The
model is left as it was: gradients are set aside, batch-norm statistics go to scratch buffers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxchimera.runtime.gradients import take_gradients
from fxchimera.runtime.message import Payload
from fxchimera.runtime.program import Program
from fxchimera.runtime.replica import Replica
from fxchimera_passes.keyed import microbatch_randomness

__all__ = ["StageTimes", "time_stage", "time_stages"]

Loss = Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that one micro-batch takes on one stage, medians of the rounds.

    Attributes:
        forward: F, of a micro-batch whose backward will be whole.
        split_forward: F, of a micro-batch whose backward will be split.
        backward: B.
        input_grad: I.
        weight_grad: W.
    """

    forward: float
    split_forward: float
    backward: float
    input_grad: float
    weight_grad: float


def time_stages(
    replicas: Sequence[Replica], program: Program, inputs: Sequence[torch.Tensor], *, loss: Loss | None = None, rounds: int = 5
) -> tuple[StageTimes, ...]:
    """Time all stages of one pipe, given in order; ``inputs`` are all input tensors of a micro-batch.

    Args:
        replicas: The replicas of stages 0, 1, ...; all in this process.
        program: The recording that fits the micro-batch.
        inputs: All input tensors of one micro-batch.
        loss: What the last stage's outputs are turned into before their backward; None: their sum.
        rounds: Rounds to take the median of, after one that is not counted.
    """
    found, received = [], list[torch.Tensor]()
    for replica in replicas:
        last = replica is replicas[-1]
        times, received = time_stage(replica, program, received, inputs, loss=loss if last else None, rounds=rounds)
        found.append(times)
    return tuple(found)


def time_stage(
    replica: Replica,
    program: Program,
    received: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    loss: Loss | None = None,
    rounds: int = 5,
) -> tuple[StageTimes, list[torch.Tensor]]:
    """Time one stage on the values ``received``, which stay as they are; returns what it sends on, too."""
    earlier = take_gradients(replica.parameters)
    replica.begin(())
    taken: list[tuple[float, ...]] = []
    try:
        with microbatch_randomness(0, 0, 0), torch.enable_grad():
            for _ in range(rounds + 1):
                whole = _once(replica, program, received, inputs, loss, split=False)
                taken.append((*whole[0], *_once(replica, program, received, inputs, loss, split=True)[0]))
    finally:
        replica.forget()
        for name, gradient in earlier.items():
            replica.parameters[name].grad = gradient
    forward, backward, _, split_forward, input_grad, weight_grad = map(statistics.median, zip(*taken[1:], strict=True))
    times = StageTimes(
        forward=forward, split_forward=split_forward, backward=backward, input_grad=input_grad, weight_grad=weight_grad
    )
    return times, whole[1]


def _once(
    replica: Replica,
    program: Program,
    received: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    loss: Loss | None,
    *,
    split: bool,
) -> tuple[tuple[float, float, float], list[torch.Tensor]]:
    """Run a micro-batch once; returns the seconds of its forward and of the one or two parts of its backward, and its outputs."""
    entering: Payload = [tensor.clone() for tensor in received]
    start = _now()
    outputs = replica.forward(0, program, entering, inputs, deferred_norms=True, split=split)
    forward = _now() - start
    value = None if loss is None else loss(outputs)
    sent = program.stage(replica.stage).sent
    gradients: Payload = [torch.ones_like(tensor) for tensor, of in zip(outputs, sent, strict=False) if of.meta.requires_grad]
    if not sent and loss is None:
        value = torch.stack([tensor.sum() for tensor in outputs if tensor.requires_grad]).sum()
    start = _now()
    replica.backward(0, gradients, value, 1.0)
    middle = _now()
    replica.weight_part(0)
    end = _now()
    replica.deltas.clear()
    take_gradients(replica.parameters)
    return (forward, middle - start, end - middle), [tensor.detach() for tensor in outputs]


def _now() -> float:
    """Seconds, after everything that an accelerator has been given to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
