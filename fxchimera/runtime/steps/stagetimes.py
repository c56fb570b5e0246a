"""How long F, B, I and W of one stage take on this machine: what the choice of order and of cuts is made from.

The stage runs by itself on what the stages before and after sent, whole and split in turns, so that a busy moment slows both alike.
The parameters are left as they were: gradients and hooks are set aside, batch-norm statistics go to scratch buffers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from fxchimera.runtime.message import Payload
from fxchimera.runtime.stages.gradients import HeldHooks, take_gradients
from fxchimera.runtime.stages.program import Program
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.feed import moved
from fxchimera.schedule.measurement import StageTimes
from fxchimera_passes.assumed import collecting
from fxchimera_passes.keyed import microbatch_randomness

__all__ = ["Passage", "Sample", "now", "pass_through", "time_stage"]

_NUMBER = 0  # of the micro-batch in a replica that has no other in flight
_LEAST_SECONDS, _MOST_ROUNDS = 0.05, 50  # a quick stage is timed more often than asked for: a busy moment is long for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The micro-batch that flows through the stages while they are timed.

    Attributes:
        program: The recording that fits it.
        inputs: All its input tensors.
        loss: What the last stage's outputs are turned into before their backward; None: their sum.
        weight: What the loss counts.
        randomness: Seed, step and micro-batch, the names of its random draws.
        rounds: Rounds to take the median of, at least, after one that is not counted.
        nodes: Time every node of the recording by itself, too.
    """

    program: Program
    inputs: Sequence[torch.Tensor]
    loss: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
    weight: float = 1.0
    randomness: tuple[int, int, int] = (0, 0, 0)
    rounds: int = 5
    nodes: bool = False

    def on(self, device: torch.device | None) -> Sample:
        """The same micro-batch on a device."""
        return self if device is None else replace(self, inputs=[moved(tensor, device) for tensor in self.inputs])


@dataclass(frozen=True, slots=True)
class Passage:
    """What timing a stage gave: the seconds, what it sends on, and the gradients for the stage before."""

    times: StageTimes
    outputs: list[torch.Tensor]
    gradients: Payload


def pass_through(replica: Replica, sample: Sample, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what the stage sends on when it gets ``received``, which stays as it is."""
    with _aside(replica, sample):
        outputs = replica.forward(_NUMBER, sample.program, _copies(received), sample.inputs, deferred_norms=True)
    return [tensor.detach() for tensor in outputs]


def time_stage(replica: Replica, sample: Sample, received: Sequence[torch.Tensor], gradients: Payload | None = None) -> Passage:
    """Time one stage on the values ``received``, which stay as they are.

    ``gradients`` are those of what it sends on, from the stage after; ones when None.
    """
    taken: list[tuple[float, ...]] = []
    with _aside(replica, sample):
        begin = now()
        while len(taken) <= sample.rounds or (len(taken) < _MOST_ROUNDS and now() - begin < _LEAST_SECONDS):
            whole = _once(replica, sample, received, gradients, split=False)
            taken.append((*whole[0], *_once(replica, sample, received, gradients, split=True)[0]))
    forward, backward, _, split_forward, input_grad, weight_grad = map(statistics.median, zip(*taken[1:], strict=True))
    times = StageTimes(
        forward=forward, split_forward=split_forward, backward=backward, input_grad=input_grad, weight_grad=weight_grad
    )
    return Passage(times, whole[1], whole[2])


@contextmanager
def _aside(replica: Replica, sample: Sample) -> Iterator[None]:
    """Set the gradients and the user's hooks on the parameters aside, and give the sample's random draws their names."""
    held = [HeldHooks(parameter) for parameter in replica.parameters.values()]
    earlier = take_gradients(replica.parameters)
    replica.begin(())
    try:
        with microbatch_randomness(*sample.randomness), torch.enable_grad(), collecting():
            yield
    finally:
        replica.forget()
        for name, gradient in earlier.items():
            replica.parameters[name].grad = gradient
        for hooks in held:
            hooks.give_back()


def _once(
    replica: Replica, sample: Sample, received: Sequence[torch.Tensor], gradients: Payload | None, *, split: bool
) -> tuple[tuple[float, float, float], list[torch.Tensor], Payload]:
    """Run the micro-batch once: seconds of its forward and of the one or two parts of its backward, outputs, and gradients."""
    sent, entering = sample.program.stage(replica.stage).sent, _copies(received)
    is_last = replica.stage == len(sample.program.plan.stages) - 1
    start = now()
    outputs = replica.forward(_NUMBER, sample.program, entering, sample.inputs, deferred_norms=True, split=split)
    value = sample.loss(outputs) if is_last and sample.loss is not None else None
    forward = now() - start
    if is_last and value is None:
        value = _sum(outputs)
    if gradients is None:
        gradients = [torch.ones_like(tensor) for tensor, of in zip(outputs, sent, strict=False) if of.meta.requires_grad]
    start = now()
    back = replica.backward(_NUMBER, gradients, value, sample.weight)
    middle = now()
    replica.weight_part(_NUMBER)
    end = now()
    replica.deltas.clear()
    take_gradients(replica.parameters)
    return (forward, middle - start, end - middle), [tensor.detach() for tensor in outputs], back


def _sum(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A number that depends on all that the model returns with a gradient."""
    parts = [tensor.sum() for tensor in outputs if tensor.requires_grad and tensor.is_floating_point()]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum() if parts else None


def _copies(received: Sequence[torch.Tensor]) -> Payload:
    return [tensor.clone() for tensor in received]


def now() -> float:
    """Seconds, after everything that an accelerator has been given to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
