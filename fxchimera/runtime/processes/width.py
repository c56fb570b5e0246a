"""The counterparts of a rank: the ranks of the other pipelines that hold the same stages.

They add up the gradients that they own, after their mirrors' have come in, while the rest of the pipeline still computes; and they
tell each other, rarely, what else belongs to all pipelines: weights at the start, statistics of batch norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.caller import Answer, Caller
from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.failures.failure import Failure
from fxchimera.runtime.failures.patience import Awaited
from fxchimera.runtime.failures.sharedfailure import resolve_cause
from fxchimera.runtime.processes.circle import Circle
from fxchimera.runtime.processes.groups import Group
from fxchimera.runtime.sharded import is_sharded

__all__ = ["DeviceSums", "Width"]

_JOIN_SECONDS = 2.0


class DeviceSums(Protocol):
    """What makes sums where the tensors are: on the device that ``lane`` is of, without a wait of the host, or on the CPU."""

    lane: Lane | None

    def sum(self, buffer: torch.Tensor) -> None:
        """Replace a buffer by its sum over all pipelines."""

    def begin_sum(self, buffer: torch.Tensor) -> torch.Event:
        """Queue that on the device; returns the event after which the sum is there."""

    def end_sum(self, done: torch.Event) -> None:
        """Let the rank's stream wait for a sum."""

    def close(self) -> None:
        """Close the connections."""


class Width:
    """One rank's end of the exchange with its counterparts, all of which make the same calls in the same order.

    The calls are made by a helper thread.  When it has ended, the connections are closed, which releases the counterparts' threads
    that wait for this rank; one that waits for another is released by that one, and two that wait for each other would have met.
    ``through`` makes sums where the gradients are.

    Args:
        group: The counterparts, by pipeline.
        failure: Where a broken connection is reported.
        rank: This rank, for errors.
    """

    def __init__(self, group: Group, failure: Failure, rank: int) -> None:
        self._circle: Circle | None = Circle(group)
        self.index, self.size = self._circle.index, self._circle.size
        self._failure, self._rank = failure, rank
        self.through: DeviceSums | None = None
        grid = failure.grid
        others = tuple(row[rank] for pipeline, row in enumerate(grid.processes) if pipeline != grid.pipeline)
        self._awaited = Awaited(grid.process, others, meeting=True)
        self._thread = Caller("fxchimera-width")
        self._thread.start()

    def begin_sum(self, buffer: torch.Tensor) -> Answer:
        """Begin to replace a buffer by its sum over all pipelines, see :meth:`Circle.sum`; ``wait`` tells when it is done."""
        members = self._members()
        through = self.through if self.through is not None and self.through.lane is None else members
        return self._thread.ask(partial(through.sum, buffer))

    def wait(self, answer: Answer, what: str) -> Any:
        """Wait for what was begun; ``what`` names it for an error.

        Raises:
            PipelineError: Another rank failed, or the connection is broken.
        """
        result = self._failure.wait(answer, f"rank {self._rank}, in {what} with the other pipelines,", self._awaited)
        if isinstance(result, FxChimeraError):
            raise result
        if isinstance(result, Exception):
            text = f"{what} with the other pipelines broke: {type(result).__name__}: {result}"
            raise resolve_cause(self._failure, self._failure.cause_at(self._rank, text)).error() from result
        return result

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every counterpart's object, by pipeline."""
        return list(self._call(partial(self._members().gather, value), what))

    def spread(self, value: Any, what: str) -> Any:
        """Return the object of the counterpart in pipeline 0."""
        return self._call(partial(self._members().spread, value), what)

    def take_values(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite parameters and buffers by those of the counterpart in pipeline 0; not those on the meta device.

        Raises:
            FxChimeraError: One is sharded.
        """
        if any(map(is_sharded, tensors)):
            raise FxChimeraError(
                f"parallelize has sharded a stage, but these processes are {self.size} pipelines, whose gradients are summed here; "
                "pass device_mesh=, of which one dimension is the pipeline and the others are your own"
            )
        members = self._members()

        def call() -> None:
            for tensor in tensors:
                if not tensor.is_meta:
                    members.spread_tensor(tensor)

        self._call(call, "the exchange of parameters and buffers")

    def close(self) -> None:
        """End the thread and close the connections; may be called more than once."""
        self._thread.tasks.put(None)
        self._thread.join(timeout=_JOIN_SECONDS)
        through, self.through = self.through, None
        if through is not None:
            through.close()
        self._circle = None

    def _call(self, call: Callable[[], Any], what: str) -> Any:
        return self.wait(self._thread.ask(call), what)

    def _members(self) -> Circle:
        assert self._circle is not None, "a pipeline that has been closed refuses its calls before"
        return self._circle
