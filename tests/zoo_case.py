"""One model of the zoo through the one line, against the plain model: everything in which a user could see them differ.

A check is bitwise, close (G1c: every gradient within 1e-6 of its norm in float32, with a floor of a thousandth of the norm of all
gradients) or different.  A model that draws no random numbers is compared with a plain loop over its micro-batches, which
knows nothing of fxchimera; another one with ``fxchimera.reference``, the plain model under the same keyed randomness.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fxchimera
from fxchimera_passes._torch import FakeTensor
from fxchimera_passes.capture.state import without_cache
from fxchimera_passes.structure import flatten
from tests.parity import TOLERANCE
from tests.zoo_models import Sample, Seen, buffers_kept, draws, gradients, pieces, plain_loop, samples_of

__all__ = ["Check", "Outcome", "run_cell"]

_FLOOR = 1e-3
_COARSE = 5e-2  # for half precision
_VALUES = 10.0  # a loss, an output or a buffer may be off by this many tolerances, relative to its own norm


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: "bitwise", "close" or "different", with the largest relative error."""

    what: str
    verdict: str
    error: float = 0.0
    detail: str = ""


@dataclass(slots=True)
class Outcome:
    """What one cell (a model, N, a schedule) gave; ``notes`` are the recording's warnings."""

    schedule: str
    n: int
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    witness: str = ""
    wrap_seconds: float = 0.0
    balance: float = 0.0
    collects: bool = False


class Taps:
    """Wraps loss functions so that the outputs they see are kept."""

    def __init__(self) -> None:
        self.outputs: list[list[Tensor]] = []

    def wrap(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``loss_fn`` with a copy of its first argument's tensors kept."""

        def tapped(output: Any, *target: Any) -> Tensor:
            tensors = flatten(output)[0]
            if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                self.outputs.append([tensor.detach().clone() for tensor in tensors])
            return loss_fn(output, *target)

        return tapped

    def take(self) -> list[list[Tensor]]:
        """Return what was kept since the last call."""
        kept, self.outputs = self.outputs, []
        return kept


class Cell:
    """One model, N and schedule: the pipeline's model, and an equal plain one."""

    def __init__(self, zoo: Any, name: str, n: int, schedule: str, stages: int, rows: int | None) -> None:
        self.model, self.samples = samples_of(zoo, name, rows)
        self.plain, _ = samples_of(zoo, name, rows)
        self.n, self.schedule, self.stages = n, schedule, stages
        self.outcome = Outcome(schedule, n)
        self.taps = Taps()
        self.random = draws(self.plain, pieces(self.samples[0], n)[0])
        self._equalise()

    def _equalise(self) -> None:
        """Give both models the same state; parameters that their model leaves uninitialised get small numbers."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.is_floating_point() and not parameter.isfinite().all():
                    parameter.normal_(std=0.02)
            ours, plain = [[*model.parameters(), *model.buffers()] for model in (self.model, self.plain)]
            for source, copy in zip(ours, plain, strict=True):
                copy.copy_(source)

    def run(self) -> Outcome:
        """Two steps on two batches and an evaluation between them."""
        first, second = self.samples
        options = {"num_stages": self.stages, "n_microbatches": self.n, "schedule": self.schedule, "seed": 7}
        loss_fn = self.taps.wrap(first.loss_fn)
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught, self._pipeline(first, loss_fn, options) as pipe:
            self.outcome.wrap_seconds = time.perf_counter() - began
            self.outcome.notes = [str(w.message) for w in caught if "fxchimera" in w.filename or "zoo_case" in w.filename]
            costs = [stage.cost_seconds for stage in pipe.plan.stages]
            self.outcome.balance = sum(costs) / len(costs) / max(costs)
            self.outcome.collects = _collects(pipe.plan)
            self._step("step", pipe, first, 0, options)
            self._update()
            self._evaluate(pipe, first)
            self.model.zero_grad()
            self._step("second batch", pipe, second, 1, options)
        return self.outcome

    def _pipeline(self, first: Sample, loss_fn: Any, options: dict[str, Any]) -> fxchimera.Pipeline:
        return fxchimera.pipeline(self.model, example_args=first.args, example_kwargs=first.kwargs, loss_fn=loss_fn, **options)

    def _step(self, what: str, pipe: fxchimera.Pipeline, sample: Sample, number: int, options: dict[str, Any]) -> None:
        self.taps.take()
        loss = pipe.step(*sample.args, target=sample.target, **sample.kwargs)
        found = Seen(loss, self._outputs_seen(), gradients(self.model))
        expected = self._expected(sample, number, options)
        self._compare(what, found, expected)
        self._check(f"{what}: buffers", dict(self.model.named_buffers()), dict(self.plain.named_buffers()))

    def _outputs_seen(self) -> list[list[Tensor]]:
        """The micro-batches' outputs in the last run: one that assumed a wrong answer was undone, and run again."""
        return self.taps.take()[-self.n :]

    def _expected(self, sample: Sample, number: int, options: dict[str, Any]) -> Seen:
        self.plain.zero_grad()
        if not self.random:
            self.outcome.witness = "eager loop"
            with without_cache(self.plain):
                return plain_loop(self.plain, sample, self.n, backward=True)
        self.outcome.witness = "reference"
        taps = Taps()
        kwargs = dict(sample.kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fxchimera.reference(
                self.plain, *sample.args, target=sample.target, loss_fn=taps.wrap(sample.loss_fn), step=number,
                **options, **kwargs,
            )  # fmt: skip
        return Seen(result.loss, taps.take(), result.gradients)

    def _update(self) -> None:
        """One step of gradient descent, and the plain model's state made equal so that errors do not add up."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
        self._equalise()

    def _evaluate(self, pipe: fxchimera.Pipeline, sample: Sample) -> None:
        self.plain.eval()
        try:
            with torch.no_grad():
                drawn = draws(self.plain, pieces(sample, self.n)[0])
                with buffers_kept(self.plain):  # a forward may write them in evaluation too
                    expected = plain_loop(self.plain, sample, self.n, backward=False)
                with without_cache(self.plain, always=True):
                    cacheless = plain_loop(self.plain, sample, self.n, backward=False)
        except Exception as error:
            self.outcome.notes.append(f"the plain model cannot be evaluated: {type(error).__name__}: {error}")
            return
        finally:
            self.plain.train()
        self.taps.take()
        loss = pipe.evaluate(*sample.args, target=sample.target, **sample.kwargs)
        found = Seen(loss, self._outputs_seen())
        if not self.model.training:
            self.outcome.checks.append(Check("evaluation: mode", "different", detail="the model is left in eval mode"))
        if drawn:
            self.outcome.notes.append("random in evaluation: not compared")
            return
        if [len(output) for output in found.outputs] == [len(output) for output in cacheless.outputs]:
            expected = cacheless  # key-value caches that cannot cross the cut are left out, with a warning
        expected.gradients = {}
        self._compare("evaluation", found, expected)

    # ---- judging

    def _compare(self, what: str, found: Seen, expected: Seen) -> None:
        self._judge(f"{what}: loss", found.loss, expected.loss, _tolerance(expected.loss) * _VALUES)
        self._outputs(f"{what}: outputs", found.outputs, expected.outputs)
        whole = sum(float(_wide(g).norm()) ** 2 for g in expected.gradients.values() if g is not None) ** 0.5
        for name, wanted in expected.gradients.items():
            got = found.gradients.get(name)
            if (got is None) != (wanted is None):
                self.outcome.checks.append(
                    Check(f"{what}: gradients", "different", float("inf"), f"{name}: {_kind(got)} instead of {_kind(wanted)}")
                )
            elif got is not None and wanted is not None:
                self._judge(f"{what}: gradients", got, wanted, _tolerance(wanted), name, _FLOOR * whole)

    def _outputs(self, what: str, found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
        """Compare the micro-batches' outputs in the order in which they fit best: ranks do not take turns."""
        if len(found) != len(expected):
            self.outcome.checks.append(Check(what, "different", float("inf"), f"{len(found)} outputs instead of {len(expected)}"))
            return
        tries = [list(zip(order, expected, strict=True)) for order in itertools.permutations(found)]
        best = min(tries, key=lambda pairs: sum(_distance(a, b) for a, b in pairs))
        for got, wanted in best:
            if [t.shape for t in got] != [t.shape for t in wanted]:
                shapes = f"{[tuple(t.shape) for t in got]} instead of {[tuple(t.shape) for t in wanted]}"
                self.outcome.checks.append(Check(what, "different", float("inf"), shapes))
                continue
            for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
                self._judge(what, a, b, _tolerance(b) * _VALUES, str(index))

    def _check(self, what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for name, wanted in expected.items():
            if isinstance(wanted, Tensor):
                self._judge(what, found[name], wanted, _tolerance(wanted) * _VALUES, name)

    def _judge(self, what: str, got: Tensor, wanted: Tensor, tolerance: float, name: str = "", floor: float = 0.0) -> None:
        got, wanted = _wide(got), _wide(wanted)
        if (
            got.shape == wanted.shape
            and torch.equal(torch.nan_to_num(got), torch.nan_to_num(wanted))
            and torch.equal(got.isnan(), wanted.isnan())
        ):
            self.outcome.checks.append(Check(what, "bitwise"))
            return
        error = (
            float((got - wanted).norm()) / max(float(wanted.norm()), floor, 1e-30) if got.shape == wanted.shape else float("inf")
        )
        verdict = "close" if error <= tolerance else "different"
        self.outcome.checks.append(Check(what, verdict, error, name))


def _kind(value: Any) -> str:
    return "nothing" if value is None else "a gradient"


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _tolerance(tensor: Tensor) -> float:
    dtype = torch.float32 if not tensor.is_floating_point() else tensor.dtype
    return TOLERANCE.get(dtype, _COARSE)


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    return sum(float((_wide(a) - _wide(b)).nan_to_num().abs().sum()) for a, b in zip(found, expected, strict=True))


def _collects(plan: Any) -> bool:
    """Tell whether a parameter or a value of the plan gets gradients from three or more stages."""
    readers: dict[str, int] = {}
    for stage in plan.stages:
        for name in (*stage.parameters, *(f"value {value.name}" for value in stage.received if value.meta.requires_grad)):
            readers[name] = readers.get(name, 0) + 1
    return any(count >= (2 if name.startswith("value ") else 3) for name, count in readers.items())


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, as bitwise comparisons need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_cell(zoo: Any, name: str, *, n: int, schedule: str, stages: int = 4, rows: int | None = None) -> Outcome:
    """Compare one cell.

    Raises:
        ValueError: the batch does not divide by ``n``.
        FxChimeraError: the pipeline refuses the model.
    """
    with one_thread():
        return Cell(zoo, name, n, schedule, stages, rows).run()
