"""Which way a recording goes where the forward asks for a value that depends on parameters.

    path       answers (True, False), then guesses
    reads      0: True   1: False   2: ?   3: ?      a guess is what an earlier recording had there, else what that line had before

No weights are looked at, so every rank guesses alike.  For planning, other answers are tried until every parameter has been read
on some path: what only another path reads is placed beside its neighbour there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from fxchimera_passes.captured import Answer, Assumption
from fxchimera_passes.errors import CaptureError

__all__ = ["MOST_READS", "UNKNOWN", "Explored", "Guesses", "Path", "answer_kind", "explore", "note_of"]

_Recording = TypeVar("_Recording")

_BOOLS = frozenset(["__bool__", "__contains__", "is_nonzero", "equal", "allclose"])
_INTS = frozenset(["__int__", "__index__"])
_PATIENCE = 8  # guesses of False at one line before it is True's turn: "while not done" must end
MOST_READS = 1000
_TRIES = 64
_FRUITLESS = 4  # tries at one line that found no new parameter


@dataclass(frozen=True, slots=True)
class Path:
    """``answers`` are those of the first reads; ``hints`` the reads of a recording whose later answers are likely here too."""

    answers: tuple[Answer, ...] = ()
    hints: tuple[Assumption, ...] = ()


UNKNOWN = Path()


def answer_kind(function: Callable[..., Any], args: Sequence[Any]) -> type[bool] | type[int] | None:
    """Return the type of what ``function(*args)`` reads, if it is one whose answers can be assumed (no float, no list)."""
    name = getattr(function, "__name__", "")
    if name in _BOOLS:
        return bool
    if name in _INTS:
        return int
    if name != "item" or not args or not isinstance(args[0], torch.Tensor):
        return None
    dtype = args[0].dtype
    return bool if dtype == torch.bool else None if dtype.is_floating_point or dtype.is_complex else int


def note_of(assumption: Assumption) -> str:
    """Tell the user what an assumed answer costs, and how to do without."""
    return (
        f"{assumption.description} at {assumption.line} reads a value that depends on parameters: the pipeline assumes the answer, "
        "checks it in every micro-batch and repeats the step when it was wrong; a submodule would be kept whole instead"
    )


class Guesses:
    """Gives the answers of one recording, in the order in which its forward reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: list[Assumption] = []
        self._hints = {place: hint.answer for place, hint in _places(path.hints) if hint.ordinal >= len(path.answers)}
        self._at: Counter[str] = Counter()
        self._known: dict[str, list[Answer]] = {}
        self._guessed: Counter[str] = Counter()

    def take(self, kind: type[bool] | type[int], description: str, line: str) -> Assumption:
        """Return the next assumption."""
        ordinal, place = len(self.taken), (line, self._at[line])
        self._at[line] += 1
        answers = self.path.answers
        known: Answer | None = answers[ordinal] if ordinal < len(answers) else self._hints.get(place)
        if known is None:
            answer = self._guess(kind, line)
            self._guessed[line] += 1
        else:
            answer = kind(known)
            self._known.setdefault(line, []).append(answer)
        self.taken.append(Assumption(ordinal=ordinal, description=description, line=line, answer=answer))
        return self.taken[-1]

    def turned(self) -> Path | None:
        """The other way at the last read, None when that was no yes-or-no guess: what failed may be an ``assert``."""
        if len(self.taken) <= len(self.path.answers) or not isinstance(self.taken[-1].answer, bool):
            return None
        before = tuple(assumption.answer for assumption in self.taken[:-1])
        return Path((*before, not self.taken[-1].answer), self.path.hints)

    @property
    def endless(self) -> bool:
        """Whether so many answers were guessed that the forward will hardly end by itself."""
        return sum(self._guessed.values()) >= MOST_READS

    def _guess(self, kind: type[bool] | type[int], line: str) -> Answer:
        """What was known last at this line, as often as it was known there; then the opposite, which ends a loop."""
        known, guessed = self._known.get(line, ()), self._guessed[line]
        if kind is int:
            return known[-1] if known else 1
        if not known:
            return guessed >= _PATIENCE
        return bool(known[-1]) if guessed < len(known) else not known[-1]


@dataclass(frozen=True, slots=True)
class Explored(Generic[_Recording]):
    """The path that reads most parameters, and a neighbour on it for each parameter that only other paths read."""

    recording: _Recording
    beside: Mapping[str, str] = field(default_factory=dict)


def explore(
    first: _Recording,
    record: Callable[[Path], _Recording],
    reads: Callable[[_Recording], Sequence[Assumption]],
    parameters: Callable[[_Recording], Sequence[str]],
    everything: set[str],
) -> Explored[_Recording]:
    """Record other paths by turning one answer over, while ``everything`` holds parameters that no recording has read.

    Args:
        first: the recording of the first path.
        record: records another, or raises CaptureError where that cannot be done.
        reads: the assumptions of a recording.
        parameters: the parameters that it reads, in order, perhaps more than once.
        everything: the parameters of the model.
    """
    best, missing = first, everything - set(parameters(first))
    others: list[_Recording] = [first]
    fruitless: Counter[str] = Counter()
    tried: set[tuple[Answer, ...]] = set()
    while missing and len(tried) < _TRIES:
        turn = next((turn for known in others for turn in _turns(reads(known), tried, fruitless)), None)
        if turn is None:
            break
        answers, line = turn
        tried.add(answers)
        fruitless[line] += 1
        try:
            other = record(Path(answers))
        except CaptureError:  # this way leads nowhere, or to what was never meant to run
            continue
        new = missing & set(parameters(other))
        if not new:
            continue
        fruitless[line] = 0
        others.append(other)
        missing -= new
        if len(set(parameters(other))) > len(set(parameters(best))):
            best = other
    return Explored(best, _beside(parameters(best), [parameters(other) for other in others]))


def _turns(
    assumed: Sequence[Assumption], tried: set[tuple[Answer, ...]], fruitless: Mapping[str, int]
) -> Iterator[tuple[tuple[Answer, ...], str]]:
    """Yield the paths that differ from ``assumed`` in one yes-or-no answer, up to that answer, with its line."""
    for place, turned in enumerate(assumed):
        answers = (*(other.answer for other in assumed[:place]), not turned.answer)
        if isinstance(turned.answer, bool) and answers not in tried and fruitless[turned.line] < _FRUITLESS:
            yield answers, turned.line


def _beside(best: Sequence[str], others: Sequence[Sequence[str]]) -> dict[str, str]:
    """Map each name that is in ``others`` only to the one of ``best`` before it there, else to the one after it."""
    own, beside = set(best), dict[str, str]()
    for names in others:
        for line in (names, names[::-1]):
            last = ""
            for name in line:
                if name in own:
                    last = name
                elif last:
                    beside.setdefault(name, last)
    return beside


def _places(reads: Sequence[Assumption]) -> Iterator[tuple[tuple[str, int], Assumption]]:
    """Yield each read with its line and how many reads of that line came before."""
    counts: Counter[str] = Counter()
    for read in reads:
        yield (read.line, counts[read.line]), read
        counts[read.line] += 1
