"""Captures a model: record to measure, open what balance needs, record, and repeat while a rule asks to open or close a module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxchimera_passes._torch import new_fake_mode, quiet, uncompiled
from fxchimera_passes.capture.fakes import capture_device, fake_model
from fxchimera_passes.capture.finish import finish
from fxchimera_passes.capture.installed import Look
from fxchimera_passes.capture.lines import line_of
from fxchimera_passes.capture.marks import reasons
from fxchimera_passes.capture.names import parameter_aliases
from fxchimera_passes.capture.opening import can_open, choose, choose_around, refusal
from fxchimera_passes.capture.patches import RECORDING
from fxchimera_passes.capture.paths import UNKNOWN, Explored, Path, explore, note_of
from fxchimera_passes.capture.profile import Profile
from fxchimera_passes.capture.recorder import Recorder
from fxchimera_passes.capture.refusals import check_model, failing, refuse_seeding, unrecordable
from fxchimera_passes.capture.seeding import seeding_noticed
from fxchimera_passes.capture.signals import NeedClose, NeedOpen, NeedSeed
from fxchimera_passes.capture.state import generators_untouched, model_untouched, without_cache
from fxchimera_passes.captured import Captured, CaptureReport
from fxchimera_passes.errors import CaptureError
from fxchimera_passes.structure import Structure, flatten

__all__ = ["capture", "recapture"]

_Made = tuple[Recorder, Structure]
_TRIES = 32  # besides two for each module
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
    coarse: bool = False,
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
        coarse: without split points, record a model whose own forward cannot be recorded as one call, named ``whole.WHOLE``.

    Raises:
        CaptureError: the model's own forward cannot be recorded, or fails; the message names the user's line and what to do.
        PartitionError: a name in ``opened`` is unknown, or inside a module that must stay whole.
    """
    inputs, structure = flatten((args, dict(kwargs)))
    where, grain = capture_device(model, inputs, device), grain if num_stages > 1 else 1.0
    asked = dict.fromkeys(closed, "asked for")
    job = _Job(model, inputs, structure, where, asked, model.training, limit=1 / num_stages, coarse=coarse and not opened)
    with job.prepared():
        look = Look(model)
        explored, settled = job.fullest(settle=True), False
        job.profile = profile = explored.recording[0].profile
        around = choose_around(profile, model, job.closed, opened)
        job.opened.update(reasons(around, () if opened else explored.recording[0].marks, model, job.closed))
        while (more := choose(profile, model, job.closed, job.opened, limit=grain * job.limit)) or not settled:
            job.opened.update(more)
            explored, settled = job.fullest(settle=False), True
            profile = explored.recording[0].profile  # a forward that draws has called other modules this time
        for name in around.keys() & job.closed.keys():
            raise refusal(model, around[name], name, job.closed[name])
        return replace(job.described(*explored.recording), beside=explored.beside, install=look.since().put)


def recapture(
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    cache: bool = True,
    values: Mapping[str, Tensor] | None = None,
    path: Path = UNKNOWN,
) -> Captured:
    """Record the same model again for other inputs or the other mode, with the same modules opened.

    Only shapes of the model's tensors are needed, so parameters may be meta tensors by now.  The grad mode of the caller is
    recorded, so that a forward without gradients keeps the parts for which the model itself enables them.  Without ``cache``, and
    always in training, transformers models return no key-value caches.  ``values`` are those of parameters that are meta tensors by
    now, by canonical name, for modules that compute with them while they are recorded; without them such modules get random ones.
    ``path`` tells what to assume of values that depend on parameters.

    Raises:
        CaptureError: as :func:`capture`.
    """
    model, report = captured.model, captured.report
    inputs, structure = flatten((args, dict(kwargs)))
    grad = torch.is_grad_enabled()
    job = _Job(model, inputs, structure, captured.device, closed=dict(report.closed), training=training, grad_enabled=grad)
    if "" in job.closed:
        job.opened.clear()
    job.cache = cache
    job.values = values or {}
    job.seeded = {key.module for key in captured.host_keys}
    job.path = path
    job.opened.update({name: report.opened.get(name, "as before") for name in captured.open_modules})
    with job.prepared():
        captured.install()
        look = Look(model)
        made = job.record(settle=True)
        if look.since() or job.kept:  # it was a first call: record one that is like all later ones
            made = job.record(settle=False)
        return job.described(*made)


@dataclass(slots=True)
class _Job:
    """One capture: the inputs taken apart, and what is opened and closed so far.

    Modules in ``seeded`` are recorded for one seed of Python's and numpy's generators, which only those are that do more than
    ``limit`` of the work; a smaller one is closed.  ``lean`` is what even random draws give that the forward reads,
    ``path`` what values give that depend on parameters.  ``kept`` are attributes in which the forward left tensors.
    With ``coarse`` the model itself may be closed.
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
    values: Mapping[str, Tensor] = field(default_factory=dict)
    limit: float = 1.0
    coarse: bool = False
    seeding: list[str] = field(default_factory=list)
    profile: Profile | None = None
    lean: float | None = None
    path: Path = UNKNOWN
    kept: Mapping[str, Iterable[str]] = field(default_factory=dict)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Hold the process for this recording and put everything back afterwards."""
        model = self.model
        check_model(model)
        with ExitStack() as stack:
            stack.enter_context(RECORDING)
            self.seeding = stack.enter_context(seeding_noticed())
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
        for _ in range(2 * len(list(self.model.modules())) + _TRIES):
            mode = new_fake_mode()
            with model_untouched(self.model, settle=settle), fake_model(self.model, mode, self.device) as real:
                real.update({id(self.model.get_parameter(name)): value for name, value in self.values.items()})
                recorder = Recorder(
                    self.model, self.opened, mode, self.device, real,
                    seeded=self.seeded, lean=self.lean, path=self.path, may_assume=self._may_assume,
                    parked={} if settle else self.kept,
                )  # fmt: skip
                out = self._attempt(recorder)
            if out is not None:
                self.kept = recorder.attributes.kept
                return recorder, out
        opened, closed = ", ".join(filter(None, self.opened)), ", ".join(self.closed)
        raise CaptureError(
            f"{type(self.model).__name__} cannot be recorded: its modules have to be opened ({opened or 'none'}) and closed "
            f"({closed or 'none'}) in turn, as they hand each other tensors other than by arguments; put those that do into one "
            "module"
        )

    def fullest(self, *, settle: bool) -> Explored[_Made]:
        """Record for planning: of the paths that random draws or parameters decide, the one that reads most parameters."""
        found: list[Explored[_Made]] = []
        for lean in _LEANS:
            self.lean = lean
            found.append(self._explored(settle))
            if not found[-1].recording[0].reads.drew:
                break
        return max(found, key=lambda explored: len(set(explored.recording[0].parameters_read)))

    def _explored(self, settle: bool) -> Explored[_Made]:
        def attempt(path: Path) -> _Made:
            self.path = path
            return self.record(settle=settle)

        first = attempt(UNKNOWN)
        layout, coarse = ({*self.opened}, {*self.closed}), self.coarse
        self.coarse = False
        everything = {*parameter_aliases(self.model)}
        explored = explore(first, attempt, lambda made: made[0].assumed, lambda made: made[0].parameters_read, everything)
        self.coarse = coarse
        if layout != ({*self.opened}, {*self.closed}):
            explored = replace(explored, recording=attempt(Path(hints=tuple(explored.recording[0].assumed))))
        return explored

    def described(self, recorder: Recorder, out: Structure) -> Captured:
        """Describe a recording."""
        report = CaptureReport(
            opened={name: self.opened[name] for name in sorted(recorder.entered)},
            closed=self.closed,
            stateful=recorder.stateful,
            carried=recorder.attributes.carried(attached=False),
            attached=recorder.attributes.carried(attached=True),
            notes=tuple(dict.fromkeys((*self.notes, *recorder.notes, *map(note_of, recorder.assumed)))),
        )
        captured = finish(recorder, self.model, (self.structure, out), parameter_aliases(self.model), report)
        refuse_seeding(captured, self.seeding)
        return replace(captured, cache=self.cache, assumed=tuple(recorder.assumed))

    def _attempt(self, recorder: Recorder) -> Structure | None:
        """Record once; None when a module was opened or closed and another try is due."""
        try:
            return recorder.record(self.inputs, self.structure)
        except NeedClose as signal:
            self._close(recorder, signal.module, signal.reason, signal.line, signal, fatal=signal.fatal)
        except NeedSeed as signal:
            self._seed(recorder, signal)
        except NeedOpen as signal:
            name = recorder.writer.names.modules.get(id(signal.module), "")
            if name in self.opened or name in self.closed or not can_open(signal.module):
                self._close(recorder, signal.reader, signal.reason, signal.line, signal, fatal=True)
            else:
                self.opened[name] = f"{signal.reason} (at {signal.line})"
        except Exception as error:
            turned = recorder.reads.guesses.turned()
            if turned is not None:
                self.path = turned
                return None
            module = recorder.frames.failed or self.model
            if "" in self.closed:  # it was run for real, too
                raise failing(self.model, error) from error
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

    def _may_assume(self, name: str) -> bool:
        """Whether the opened module ``name`` is to go on where it reads a value; a small one is closed, the model cannot be."""
        return not name or self.profile is None or not self._small(name)

    def _small(self, name: str) -> bool:
        return self.profile is None or self.profile.share(name) <= self.limit

    def _close(
        self, recorder: Recorder, module: nn.Module, reason: str, line: str, cause: BaseException, *, fatal: bool = False
    ) -> None:
        name = recorder.writer.names.modules.get(id(module), "")
        if not name and (fatal or not self._may_close_all(recorder)):
            raise unrecordable(self.model, line, reason) from cause
        if name:
            self.opened.pop(name, None)
        else:
            self.opened.clear()
            self.notes.clear()
        self.closed[name] = f"{reason} (at {line})"

    def _may_close_all(self, recorder: Recorder) -> bool:
        """Whether the model itself may become one call.  Without values it is not tried, as it may have to run for real."""
        return self.coarse and "" not in self.closed and not any(tensor.is_meta for tensor in recorder.real.values())
