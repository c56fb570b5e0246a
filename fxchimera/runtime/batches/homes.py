"""Every buffer that the forward writes has one stage, whichever paths the micro-batches take.

    micro-batch 0   if a: ... mean += h         stage 0 writes
    micro-batch 1   if b: ...      mean += h    stage 3 writes: out of order, and to the copy of another rank

Within one recording a cut sees to it.  Two recordings, of two paths or modes, may put the same buffer into different stages; then
a stage would read a value that another one is still to write, or, between processes, that only another rank has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.stages.program import Program
from fxchimera_passes.captured import info

__all__ = ["Homes"]


class Homes:
    """Refuses jobs whose recordings use a written buffer in several places.

    Args:
        owner: The rank that holds the valid tensor of every buffer, by name; here it is learned for those of which the first
            recording knows nothing.
        first: The first recording.
        down: The rank of each stage of the down pipe.
        processes: Ranks have copies of their own, so that places must agree over all jobs, not only within one.
    """

    def __init__(self, owner: dict[str, int], first: Program, down: Sequence[int], *, processes: bool) -> None:
        self._owner, self._down, self._processes = owner, tuple(down), processes
        self._model = first.captured.model
        self._settled = {name for stage in first.plan.stages for name in stage.buffers}
        self._ranks: dict[str, set[int]] = {}
        self._written: set[str] = set()
        self._writes: weakref.WeakKeyDictionary[Program, frozenset[str]] = weakref.WeakKeyDictionary()
        self._alone: weakref.WeakSet[Program] = weakref.WeakSet()  # all micro-batches went this way before

    def check(self, programs: Iterable[Program]) -> None:
        """Look at the recordings of one job; they must be those of the right paths.

        Raises:
            FxChimeraError: A buffer is written, and is used in two stages, or on two ranks over time; the message names it.
        """
        distinct = dict.fromkeys(programs)
        if len(distinct) == 1 and all(program in self._alone for program in distinct):
            return
        stages: dict[str, set[int]] = {}
        for program in distinct:
            for stage in program.plan.stages:
                for name in stage.buffers:
                    stages.setdefault(name, set()).add(stage.index)
        written = {name for program in distinct for name in self._written_by(program)}
        for name in sorted(written & stages.keys()):
            if len(stages[name]) > 1:
                raise _refusal(name, f"the stages {sorted(stages[name])}, depending on the path that a micro-batch takes")
        if self._processes:
            self._check_ranks(stages, written)
        if len(distinct) == 1:
            self._alone.update(distinct)

    def _settle(self, name: str, rank: int) -> None:
        self._settled.add(name)
        buffer = self._model.get_buffer(name)
        self._owner |= {alias: rank for alias, other in self._model.named_buffers(remove_duplicate=False) if other is buffer}

    def _written_by(self, program: Program) -> frozenset[str]:
        if program not in self._writes:
            self._writes[program] = frozenset(name for node in program.captured.graph.nodes for name in info(node).writes)
        return self._writes[program]

    def _check_ranks(self, stages: Mapping[str, set[int]], written: set[str]) -> None:
        ranks = {name: {self._down[stage] for stage in found} for name, found in stages.items()}
        for name in sorted(stages.keys() & (self._written | written)):
            own = {self._owner[name]} if name in self._settled else set()
            everywhere = self._ranks.get(name, set()) | ranks[name] | own
            if len(everywhere) > 1:
                raise _refusal(name, f"stages of the ranks {sorted(everywhere)}, depending on the mode or the path")
            if not own:
                self._settle(name, min(everywhere))
        self._written |= written
        for name, found in ranks.items():
            self._ranks.setdefault(name, set()).update(found)


def _refusal(name: str, where: str) -> FxChimeraError:
    return FxChimeraError(
        f"buffer {name!r} is written in forward and used in {where}; each would go on with another value than in a plain loop. "
        "Let one submodule with parameters do all that reads or writes it: what reads a parameter always keeps its stage"
    )
