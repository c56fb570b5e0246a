"""Captures a model: record to measure, open what balance needs, record, and repeat while a rule asks to open or close a module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxchimera_passes._torch import hooks_of, new_fake_mode, quiet, uncompiled
from fxchimera_passes.capture.fakes import capture_device, fake_model
from fxchimera_passes.capture.finish import finish
from fxchimera_passes.capture.lines import line_of
from fxchimera_passes.capture.names import parameter_aliases
from fxchimera_passes.capture.opening import can_open, choose, choose_around, refusal
from fxchimera_passes.capture.patches import RECORDING
from fxchimera_passes.capture.profile import Profile
from fxchimera_passes.capture.recorder import Recorder
from fxchimera_passes.capture.signals import NeedClose, NeedOpen, NeedSeed
from fxchimera_passes.capture.state import generators_untouched, model_untouched, without_cache
from fxchimera_passes.captured import Captured, CaptureReport, info
from fxchimera_passes.errors import CaptureError
from fxchimera_passes.structure import Structure, flatten

__all__ = ["capture", "recapture"]

_LEANS = (1 - 2.0**-24, 0.0)  # the largest and the smallest number that an even draw in float32 gives


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_stages: int = 1,
    grain: float = 0.25,
    closed: Collection[str] = (),
    opened: Collection[str] = (),
    device: torch.device | None = None,
) -> Captured:
    """Record one forward of ``model`` on one micro-batch as a graph, without computing it.

    Args:
        model: the user's model, in the mode (training or evaluation) to record; nothing of it is changed.
        args: positional inputs of one micro-batch; their values are read only where the model reads them into Python.
        kwargs: keyword inputs.
        num_stages: how many stages the graph will be cut into (1: only the model's own forward is opened).
        grain: a module is opened when one call does more than this part of a stage's work.
        closed: qualified names of modules to keep whole.
        opened: qualified names of modules before which a cut must be possible (split points): what is around them is opened.
        device: what the tensors are recorded as living on; default the model's own device.

    Raises:
        CaptureError: the model's own forward cannot be recorded; the message names the user's line and what to do.
        PartitionError: a name in ``opened`` is unknown, or inside a module that must stay whole.
    """
    inputs, structure = flatten((args, dict(kwargs)))
    where = capture_device(model, inputs, device)
    job = _Job(model, inputs, structure, where, closed=dict.fromkeys(closed, "asked for"), training=model.training)
    job.limit = 1 / num_stages
    with job.prepared():
        job.profile = profile = job.fullest(settle=True)[0].profile
        around = choose_around(profile, model, job.closed, opened)
        job.opened.update(choose(profile, model, job.closed, num_stages=num_stages, grain=grain))
        job.opened.update({name: f"the split point {point!r} lies in it" for name, point in around.items() if name})
        captured = job.described(*job.fullest(settle=False))
    for name in around.keys() & job.closed.keys():
        raise refusal(model, around[name], name, job.closed[name])
    return captured


def recapture(
    captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool, cache: bool = True
) -> Captured:
    """Record the same model again for other inputs or the other mode, with the same modules opened.

    Only shapes of the model's tensors are needed, so parameters may be meta tensors by now.  The grad mode of the caller is
    recorded, so that a forward without gradients keeps the parts for which the model itself enables them.  Without ``cache``, and
    always in training, transformers models return no key-value caches.

    Raises:
        CaptureError: as :func:`capture`.
    """
    model, report = captured.model, captured.report
    inputs, structure = flatten((args, dict(kwargs)))
    grad = torch.is_grad_enabled()
    job = _Job(model, inputs, structure, captured.device, closed=dict(report.closed), training=training, grad_enabled=grad)
    job.cache = cache
    job.seeded = {key.module for key in captured.host_keys}
    with job.prepared():
        job.record(settle=True)
        job.opened.update({name: report.opened.get(name, "as before") for name in captured.open_modules})
        return job.described(*job.record(settle=False))


@dataclass(slots=True)
class _Job:
    """One capture: the inputs taken apart, and what is opened and closed so far.

    Modules in ``seeded`` are recorded for one seed of Python's and numpy's generators, which only those are that do more than
    ``limit`` of the work; a smaller one is closed.  ``lean`` is what even random draws give that the forward reads.
    """

    model: nn.Module
    inputs: list[Tensor]
    structure: Structure
    device: torch.device
    closed: dict[str, str]
    training: bool
    grad_enabled: bool = True
    opened: dict[str, str] = field(default_factory=lambda: {"": "the model itself"})
    seeded: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    cache: bool = True
    limit: float = 1.0
    profile: Profile | None = None
    lean: float | None = None

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Hold the process for this recording and put everything back afterwards."""
        model = self.model
        _check(model)
        with ExitStack() as stack:
            stack.enter_context(RECORDING)
            stack.enter_context(generators_untouched())
            stack.enter_context(model_untouched(model))
            if self.training != model.training:
                model.train(self.training)
            stack.enter_context(without_cache(model, always=not self.cache))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            stack.enter_context(uncompiled())
            stack.enter_context(quiet())
            yield

    def record(self, *, settle: bool) -> tuple[Recorder, Structure]:
        """Record until no rule asks to open or close another module; return the recording and the output's structure.

        With ``settle`` it is also the warm-up: hooks and flags that the model installs on its first call stay for the next ones.
        """
        for _ in range(2 * len(list(self.model.modules())) + 1):
            mode = new_fake_mode()
            with model_untouched(self.model, settle=settle), fake_model(self.model, mode, self.device) as real:
                recorder = Recorder(self.model, self.opened, mode, self.device, real, seeded=self.seeded, lean=self.lean)
                out = self._attempt(recorder)
            if out is not None:
                return recorder, out
        raise CaptureError(f"{type(self.model).__name__} cannot be recorded: its modules have to be opened and closed in turn")

    def fullest(self, *, settle: bool) -> tuple[Recorder, Structure]:
        """Record for planning: of the paths that random draws decide (layer drop), the one that reads most parameters."""
        found: list[tuple[Recorder, Structure]] = []
        for lean in _LEANS:
            self.lean = lean
            found.append(self.record(settle=settle))
            if not found[-1][0].reads.drew:
                break
        return max(found, key=lambda made: _parameters_read(made[0]))

    def described(self, recorder: Recorder, out: Structure) -> Captured:
        """Describe a recording."""
        report = CaptureReport(
            opened={name: self.opened[name] for name in sorted(recorder.entered)},
            closed=self.closed,
            stateful=recorder.stateful,
            notes=tuple(dict.fromkeys((*self.notes, *recorder.notes))),
        )
        captured = finish(recorder, self.model, (self.structure, out), parameter_aliases(self.model), report)
        return replace(captured, cache=self.cache)

    def _attempt(self, recorder: Recorder) -> Structure | None:
        """Record once; None when a module was opened or closed and another try is due."""
        try:
            return recorder.record(self.inputs, self.structure)
        except NeedClose as signal:
            self._close(recorder, signal.module, signal.reason, signal.line, signal)
        except NeedSeed as signal:
            self._seed(recorder, signal)
        except NeedOpen as signal:
            name = recorder.writer.names.modules.get(id(signal.module), "")
            if name in self.opened or name in self.closed or not can_open(signal.module):
                self._close(recorder, signal.reader, signal.reason, signal.line, signal)
            else:
                self.opened[name] = f"{signal.reason} (at {signal.line})"
        except Exception as error:
            module = recorder.frames.failed or self.model
            reason = f"it raised {type(error).__name__}: {str(error).strip()} (on tensors without values)"
            self._close(recorder, module, reason, line_of(error), error)
        return None

    def _seed(self, recorder: Recorder, signal: NeedSeed) -> None:
        name = recorder.writer.names.modules.get(id(signal.module), "")
        if name and self._small(name):
            self._close(recorder, signal.module, signal.reason, signal.line, signal)
            for other, module in self.model.named_modules():  # the next block would ask for the same
                if other in self.opened and type(module) is type(signal.module) and self._small(other):
                    self._close(recorder, module, signal.reason, signal.line, signal)
            return
        self.seeded.add(name)
        where = f"{name or 'the model'} ({type(signal.module).__name__})"
        self.notes.append(
            f"{where}: {signal.reason} (before {signal.line}), so it is recorded anew for every micro-batch, which costs time. "
            "Draw in a submodule, or with torch and without reading the value"
        )

    def _small(self, name: str) -> bool:
        return self.profile is None or self.profile.share(name) <= self.limit

    def _close(self, recorder: Recorder, module: nn.Module, reason: str, line: str, cause: BaseException) -> None:
        name = recorder.writer.names.modules.get(id(module), "")
        if not name:
            raise CaptureError(
                f"{type(self.model).__name__}.forward cannot be recorded at {line or 'an unknown line'}: {reason}. "
                "Move the branch or the computation around this line into a submodule: a submodule is kept as one whole call."
            ) from cause
        self.opened.pop(name, None)
        self.closed[name] = f"{reason} (at {line})"


def _parameters_read(recorder: Recorder) -> int:
    return len({name for node in recorder.writer.graph.nodes for name in info(node).parameters})


def _check(model: nn.Module) -> None:
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise CaptureError(f"{lazy[0]} and {len(lazy) - 1} more parameters have no shape yet: run one forward of the model first")
    if hooks_of(model)[1]:
        raise CaptureError(
            f"{type(model).__name__} itself has backward hooks, which no stage could call: register them on its submodules"
        )
