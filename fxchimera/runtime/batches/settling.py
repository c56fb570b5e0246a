"""What a run that assumed answers tells the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.stages.program import Program
from fxchimera_passes.capture.paths import Path
from fxchimera_passes.captured import Answer, Assumption

__all__ = ["MOST_RUNS", "known_paths", "unsettled"]

MOST_RUNS = 64  # of one call: each settles at least one more answer of every micro-batch


def known_paths(programs: Sequence[Program], wrong: Mapping[int, tuple[int, Answer]]) -> dict[int, Path]:
    """What a run tells of each micro-batch's path: all its answers, or those before the ``wrong`` one (ordinal, true answer)."""
    paths = {}
    for microbatch, program in enumerate(programs):
        assumed = program.captured.assumed
        answers = tuple(assumption.answer for assumption in assumed)
        if microbatch in wrong:
            ordinal, answer = wrong[microbatch]
            answers = (*answers[:ordinal], type(assumed[ordinal].answer)(answer))
        paths[microbatch] = Path(answers, assumed)
    return paths


def unsettled(latest: Assumption | None) -> FxChimeraError:
    """Say that a call was run again and again, ``latest`` being wrong in the end; None for one of another pipeline."""
    which = f"for {latest.description} at {latest.line}" if latest is not None else "in another pipeline"
    return FxChimeraError(
        f"after {MOST_RUNS} runs the answer assumed {which} is still wrong: the forward reads "
        "too many values that depend on parameters, or they differ from run to run. Move the branch into a submodule, which is "
        "kept as one whole call"
    )
