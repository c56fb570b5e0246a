"""The gradients of micro-batches are added in ascending order, in whatever order their backwards run.

A parameter's gradient may come with I or with W, and a schedule may run the weight part of a later micro-batch first.  Sums of
floats depend on the order; so a gradient that comes early waits, and is added when no earlier micro-batch can contribute any more.
When the order is ascending anyway, nothing waits and the engine adds to ``.grad`` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fxchimera.runtime.stages.gradients import own_gradients

__all__ = ["Adding", "Turns"]


class Turns:
    """Whose turn it is to add to the gradients of one replica in one step.

    Args:
        microbatches: All micro-batches that the replica will see.
        parameters: All parameters that the replica reads.
    """

    def __init__(self, microbatches: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
        self._all = {id(parameter): parameter for parameter in parameters}
        self._open: dict[int, dict[int, nn.Parameter]] = dict.fromkeys(microbatches, self._all)  # to whom each may still add
        self._waiting: dict[int, dict[int, torch.Tensor]] = {}  # by parameter and micro-batch
        self._without = dict(self._all)  # the parameters that have had no gradient yet

    def adding(self, microbatch: int, later: Sequence[nn.Parameter] = ()) -> Adding:
        """Run a backward of ``microbatch`` inside; ``later`` are the parameters that a second part of it will add to.

        The dict entered may be narrowed inside, to the parameters that will really be added to.
        """
        return Adding(self, microbatch, {id(parameter): parameter for parameter in later})

    def watched(self, microbatch: int, promised: Mapping[int, nn.Parameter]) -> dict[int, nn.Parameter]:
        """The parameters whose gradients of ``microbatch`` may have to wait."""
        watched = dict(promised)
        for other, parameters in self._open.items():
            if other < microbatch:
                watched |= parameters
        watched |= {key: self._all[key] for key, waiting in self._waiting.items() if microbatch in waiting}
        return watched

    def added(self, microbatch: int, promised: dict[int, nn.Parameter]) -> None:
        """Go on after a backward: only ``promised`` are still to come."""
        self._open[microbatch] = promised
        if self._waiting:
            self._settle()
        if self._without:
            first = {key: parameter for key, parameter in self._without.items() if parameter.grad is not None}
            own_gradients(first.values())
            self._without = {key: parameter for key, parameter in self._without.items() if key not in first}

    def early(self, microbatch: int) -> frozenset[int]:
        """Return the ids of the parameters that got a part of their gradient before its second part, which was to be all of it."""
        promised = self._open.get(microbatch, {})
        return frozenset(key for key in promised if microbatch in self._waiting.get(key, ()))

    def hold(self, key: int, microbatch: int, gradient: torch.Tensor | None) -> None:
        """Let a gradient wait for its turn."""
        if gradient is not None:
            waiting = self._waiting.setdefault(key, {})
            waiting[microbatch] = waiting[microbatch] + gradient if microbatch in waiting else gradient

    def _settle(self) -> None:
        """Add what waits for nobody any more."""
        for key, waiting in list(self._waiting.items()):
            first_open = min((other for other, parameters in self._open.items() if key in parameters), default=None)
            for microbatch in sorted(waiting):
                if first_open is not None and microbatch >= first_open:
                    break
                _add(self._all[key], waiting.pop(microbatch))
            if not waiting:
                del self._waiting[key]


class Adding:
    """See :meth:`Turns.adding`."""

    __slots__ = ("_before", "_microbatch", "_promised", "_turns", "_watched")

    def __init__(self, turns: Turns, microbatch: int, promised: dict[int, nn.Parameter]) -> None:
        self._turns, self._microbatch, self._promised = turns, microbatch, promised

    def __enter__(self) -> dict[int, nn.Parameter]:
        self._watched = self._turns.watched(self._microbatch, self._promised)
        self._before = {key: parameter.grad for key, parameter in self._watched.items()}
        for parameter in self._watched.values():
            parameter.grad = None
        return self._promised

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for key, parameter in self._watched.items():
            self._turns.hold(key, self._microbatch, parameter.grad)
            parameter.grad = self._before[key]
        if kind is None:
            self._turns.added(self._microbatch, self._promised)


def _add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add as autograd accumulates."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad + gradient
    else:
        with torch.no_grad():
            parameter.grad.add_(gradient)
