"""What a comparison of the pipeline with the plain model found: one row for everything compared, and the first stage that differs.

    row       a parameter (its gradient), a buffer, an output or the loss of a micro-batch: bitwise, close, or WRONG
    fork      the first stage whose forward gave something else, found by running the recording beside the pipeline's stages
    drifted   a copy of a parameter that is not the owner's

Forwards run from the first stage to the last and backwards the other way, so that is the order in which "first" is meant.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Literal

__all__ = ["Drifted", "Fork", "Row", "Verdict", "Verification"]

Kind = Literal["parameter", "buffer", "output", "loss"]
Verdict = Literal["bitwise", "close", "WRONG"]

_WORST = 5  # rows that the short text shows
_WHOLE = 1e-5  # by which the loss of the whole batch may differ for rounding in single precision
_STAGES = 16  # stages of which it shows a line each


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was compared.

    ``stages`` are those that use it, its owner's first.  ``norm`` is that of the plain model's gradient or value, ``absolute`` the
    largest difference of an element, ``relative`` the difference's norm over ``norm`` (for gradients at least a thousandth of
    the norm of all gradients: one that is zero in theory is noise).  ``note`` says what no number does.
    """

    kind: Kind
    name: str
    stages: tuple[int, ...]
    shape: tuple[int, ...]
    norm: float
    absolute: float
    relative: float
    tolerance: float
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """Equal to the last bit, within the tolerance, or neither (a nan is neither)."""
        if self.note or not self.relative <= self.tolerance:
            return "WRONG"
        return "bitwise" if self.absolute == 0.0 else "close"

    def __str__(self) -> str:
        where = f"stage {self.stages[0]}" if self.stages else "no stage"
        if len(self.stages) > 1:
            where += f" (read by {', '.join(map(str, sorted(self.stages)))})"
        what = "" if self.kind == "parameter" else f"{self.kind} "
        figures = self.note or f"absolute {self.absolute:.3g}, relative {self.relative:.3g} (tolerance {self.tolerance:g})"
        return f"{self.verdict:7}  {where}  {what}{self.name} {list(self.shape)}: norm {self.norm:.6g}, {figures}"


@dataclass(frozen=True, slots=True)
class Fork:
    """The first stage whose forward differs from the recording's on the plain model, and the micro-batches in which it does."""

    stage: int
    microbatches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drifted:
    """A copy of a parameter with other values than the owner's: where it is (pipeline and pipe, by name), and on which stage."""

    where: str
    stage: int
    name: str

    def __str__(self) -> str:
        return f"DRIFTED  stage {self.stage} {self.where}  {self.name}: the copy's values are not the owner's"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``pipe.verify``; true in a condition when everything agrees.

    ``str()`` is a summary, :meth:`table` has every row, :meth:`to_csv` the same for machines; ``rows`` are values.
    ``not_compared`` says in words what a plain run cannot tell.  ``whole_batch_loss`` is the plain model's on the whole batch at
    once, None with random draws, batch norm, low precision or several pipelines.  It is a second opinion on the weights of
    micro-batches, which the rows take as given, and not part of ``ok``: a loss that compares rows with each other is another
    one for micro-batches.
    """

    loss: float
    plain_loss: float
    rows: tuple[Row, ...]
    num_stages: int
    drifted: tuple[Drifted, ...] = ()
    fork: Fork | None = None
    not_compared: tuple[str, ...] = ()
    whole_batch_loss: float | None = None

    @property
    def ok(self) -> bool:
        """Whether everything agrees within the tolerances and no copy has drifted."""
        return not self.drifted and not self.wrong

    @property
    def bitwise(self) -> bool:
        """Whether everything is the same to the last bit."""
        return not self.drifted and all(row.verdict == "bitwise" for row in self.rows)

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The rows that do not agree, the largest relative difference first."""
        return tuple(sorted((row for row in self.rows if row.verdict == "WRONG"), key=_badness, reverse=True))

    @property
    def first_bad_stage(self) -> int | None:
        """The first stage that differs: in the order of the forward, else of the backward; None when all agree."""
        return self._first()[0]

    def of(self, kind: Kind) -> tuple[Row, ...]:
        """The rows of one kind."""
        return tuple(row for row in self.rows if row.kind == kind)

    def table(self) -> str:
        """Every row as a line, by stage, under the summary."""
        rows = sorted(self.rows, key=lambda row: (min(row.stages, default=-1), row.kind, row.name))
        return "\n".join([self._verdict(), *map(str, self.drifted), *map(str, rows)])

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return every row as comma-separated values, and write them to ``path`` if given."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["verdict", *(field.name for field in fields(Row))])
        for row in self.rows:
            plain = replace(row, stages=(), shape=())
            kind, name, _, _, *rest = astuple(plain)
            writer.writerow([row.verdict, kind, name, _spaced(row.stages), _spaced(row.shape), *rest])
        if path is not None:
            Path(path).write_text(stream.getvalue(), encoding="utf-8")
        return stream.getvalue()

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [self._verdict(), f"compared: {self._counts()}"]
        lines += [f"not compared: {text}" for text in self.not_compared]
        if (whole := self.whole_batch_loss) is not None and not abs(whole - self.plain_loss) <= _WHOLE * abs(whole):
            lines.append(
                f"remark: on the whole batch at once the plain model's loss is {whole:.9g}, not {self.plain_loss:.9g} as on "
                "micro-batches: see loss_weight, unless the loss compares rows with each other"
            )
        if self.bitwise:
            return "\n".join(lines)
        if not self.ok:
            lines.append(f"first stage that differs: {self._first()[1]}")
        lines += self._by_stage()
        worst = sorted((row for row in self.rows if row.verdict != "bitwise"), key=_badness, reverse=True)
        lines += [*map(str, self.drifted[:_WORST]), *map(str, worst[:_WORST])]
        if len(worst) > _WORST:
            lines.append(f"... {len(worst) - _WORST} more that are not bitwise: .table() has every row, .to_csv(path) too")
        if not self.ok:
            lines.append(self._advice())
        return "\n".join(lines)

    # ------------------------------------------------------------------ details

    def _verdict(self) -> str:
        verdict = "equal to the last bit" if self.bitwise else "equal within tolerance" if self.ok else "DIFFERENT"
        return f"pipeline and plain model are {verdict}: loss {self.loss:.9g} and {self.plain_loss:.9g}"

    def _counts(self) -> str:
        kinds: tuple[Kind, ...] = ("parameter", "buffer", "output")
        plurals = {"parameter": "gradients", "buffer": "buffers", "output": "outputs"}
        return f"over {self.num_stages} stages, the losses, {', '.join(f'{len(self.of(kind))} {plurals[kind]}' for kind in kinds)}"

    def _first(self) -> tuple[int | None, str]:
        """The first stage that differs, and in words where in it."""
        last, wrong = self.num_stages - 1, self.wrong
        if self.fork is not None:
            return self.fork.stage, f"{self.fork.stage}, in its forward of micro-batch {', '.join(self.fork.microbatches)}"
        if self.drifted:
            stage = min(drifted.stage for drifted in self.drifted)
            return stage, f"{stage}, in a copy of its parameters"
        if outputs := [row.name for row in wrong if row.kind == "output"]:
            return last, f"{last}, in the model's output of {outputs[0]}"
        if losses := [row.name for row in wrong if row.kind == "loss"]:
            return last, f"{last}, in {losses[0]}; what the model returns agrees"
        gradients = [stage for row in wrong if row.kind == "parameter" for stage in row.stages[:1]]
        if gradients:
            stage = max(gradients)
            return stage, (
                f"{stage}, in the order of the backward: in its own, in the gradient that comes to it, or in the sum of its "
                "gradients; forwards agree, and so do the gradients of the stages after it"
            )
        buffers = [stage for row in wrong if row.kind == "buffer" for stage in row.stages[:1]]
        if buffers:
            return min(buffers), f"{min(buffers)}, in a buffer; loss and gradients agree"
        return (None, "none") if not wrong else (last, f"{last}")

    def _by_stage(self) -> list[str]:
        lines = []
        for stage in range(self.num_stages):
            own = [row for row in self.rows if row.stages[:1] == (stage,)]
            counts = {kind: sum(row.verdict == kind for row in own) for kind in ("bitwise", "close", "WRONG")}
            if self.num_stages <= _STAGES or counts["close"] or counts["WRONG"]:
                worst = max((row for row in own if row.verdict != "bitwise"), key=_badness, default=None)
                text = f", the largest relative difference {worst.relative:.2g} in {worst.name}" if worst is not None else ""
                lines.append(f"  stage {stage}: {', '.join(f'{count} {kind}' for kind, count in counts.items())}{text}")
        return lines

    def _advice(self) -> str:
        stage = self.first_bad_stage
        return (
            f"to look further: pipe.plan says what stage {stage} consists of; verify the same batch with num_stages=1, and with "
            'schedule="1f1b": where the difference goes away tells whether the recording, the cut or the order makes it'
        )


def _badness(row: Row) -> tuple[bool, float]:
    excess = row.relative / row.tolerance if row.tolerance else row.relative
    return row.verdict == "WRONG", excess if excess == excess else float("inf")  # a nan is as bad as can be


def _spaced(numbers: Sequence[int] | Iterable[int]) -> str:
    return " ".join(map(str, numbers))
