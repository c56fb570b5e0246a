"""Plants bugs in a copy of this repository, one at a time, and asks whether the tests notice: ``nox -s planted``.

Each bug is one that people have met in pipeline training, in one line of the product.  With it come the tests that are to notice;
one failure is enough.  A line that is no longer there is an error, so the list cannot go stale without a word.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUGS", "Bug"]

_ROOT = Path(__file__).parents[1]
_RUNTIME = "fxchimera/runtime"
_LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Bug:
    """``line`` of ``file`` becomes ``instead``; ``tests`` are arguments of pytest."""

    name: str
    file: str
    line: str
    instead: str
    tests: str


_PARITY = "tests/local/test_parity.py tests/local/test_families.py"
BUGS = (
    Bug("gradients are not divided by N", f"{_RUNTIME}/batches/loss.py", "tuple(count / total for count in counts)",
        "tuple(1.0 for count in counts)", _PARITY),
    Bug("mean of means", f"{_RUNTIME}/batches/loss.py", "tuple(count / total for count in counts)",
        "tuple(1.0 / len(counts) for count in counts)", "tests/local/test_api_loss.py tests/local/test_parity.py"),
    Bug("the loss scale is forgotten", f"{_RUNTIME}/steps/executor.py", "weight * job.loss_scale)", "weight)",
        "tests/local/test_api_loss.py tests/local/test_scaler.py tests/local/test_parity.py"),
    Bug("a mirror's gradients are lost", f"{_RUNTIME}/steps/exchange.py",
        "self._sums.setdefault(name, GradientSum()).add(link.use, gradient)", "pass", _PARITY),
    Bug("the second direction's sum is left out", f"{_RUNTIME}/stages/gradients.py",
        "total = partial if total is None else _sum(total, partial)", "total = partial if total is None else total", _PARITY),
    Bug("uses of a tied weight are not summed", f"{_RUNTIME}/stages/gradients.py",
        "partial = self.parts[use] if partial is None else _sum(partial, self.parts[use])",
        "partial = self.parts[use] if partial is None else partial", _PARITY),
    Bug("mirrors are not refreshed", f"{_RUNTIME}/steps/exchange.py",
        "replica.parameters[name].data = value  # the owner's own memory, or what the message came in", "pass",
        "tests/process/test_processes.py"),
    Bug("earlier gradients are replaced", f"{_RUNTIME}/stages/gradients.py",
        "        earlier.add_(total)", "        earlier.copy_(total)", "tests/local/test_api_cases.py tests/local/test_parity.py"),
    Bug("masks do not depend on the micro-batch", "passes/fxchimera_passes/keyed.py",
        'text = f"{seed}/{step}/{microbatch}/', 'text = f"{seed}/{step}/0/',
        "tests/graph/test_keyed.py tests/local/test_randomness.py"),
    Bug("masks do not depend on the step", "passes/fxchimera_passes/keyed.py",
        'text = f"{seed}/{step}/{microbatch}/', 'text = f"{seed}/0/{microbatch}/',
        "tests/graph/test_keyed.py tests/local/test_randomness.py"),
    Bug("statistics of batch norm in any order", f"{_RUNTIME}/stages/batchnorm.py",
        "moments, statistic = sorted(deltas), self.module.running_mean",
        "moments, statistic = sorted(deltas, reverse=True), self.module.running_mean",
        "tests/local/test_api_statistics.py tests/local/test_parity.py"),
    Bug("the norm of the local gradients only", f"{_RUNTIME}/steps/norms.py",
        "torch.stack([gathered[process] for process in pipeline]).sum(0)", "norms", "tests/process/test_processes.py"),
    Bug("gradients are added as they come", f"{_RUNTIME}/stages/turns.py", "if other < microbatch:", "if False:",
        "tests/local/test_turns.py tests/local/test_families.py"),
    Bug("a message is not looked at", f"{_RUNTIME}/message.py", "if header[0] != key.word:", "if False:",
        "tests/local/test_runtime_message.py tests/local/test_wires.py"),
    Bug("a buffer is used again before it is written", f"{_RUNTIME}/messages/distributed.py",
        "self.leave((parcel, sent))", "self.leave((parcel, sent)), self._free.append(parcel)",
        "tests/local/test_wires.py tests/process/test_messages.py"),
    Bug("two directions share a channel", "fxchimera/schedule/channel.py",
        'flow = f"{placement.pipe_name(placement.pipe_of[action.microbatch])}-{flow}"', "pass",
        "tests/pure/test_schedule_check.py tests/pure/test_schedule_values.py tests/local/test_runtime_parts.py"),
    Bug("a received value is not copied before it is written", "passes/fxchimera_passes/split.py",
        "for node in overwritten(arrived, self.run, self.captured.model):", "for node in []:",
        "tests/graph/test_split.py tests/local/test_carried_state.py"),
    Bug("two gradients on one memory", f"{_RUNTIME}/stages/gradients.py", "parameter.grad = _own(parameter.grad)", "pass",
        "tests/local/test_shared_gradients.py"),
    Bug("the index of a save is written in place", f"{_RUNTIME}/weights/savedindex.py",
        'path = folder / f"{INDEX}.tmp"', "path = folder / INDEX",
        "tests/local/test_saving.py tests/process/test_saving.py"),
    Bug("a killed rank is not looked for", f"{_RUNTIME}/failures/fate.py", 'state in ("Z", "X")', "False",
        "tests/local/test_fate.py tests/process/test_failures.py"),
    Bug("evaluation leaves the model in its mode", f"{_RUNTIME}/batches/warmup.py", "module.training = mode", "pass",
        "tests/local/test_api_cases.py tests/local/test_api_outputs.py tests/process/test_processes.py"),
    Bug("a recording keeps its model", "passes/fxchimera_passes/capture/saved.py",
        "self._saved = weakref.ref(saved)", "self._saved = lambda: saved", "tests/local/test_leaks.py"),
)  # fmt: skip


def main() -> int:
    """Plant every bug whose name contains one of the arguments (all without); return how many nobody noticed."""
    wanted = sys.argv[1:]
    missed = 0
    for bug in BUGS:
        if not wanted or any(word in bug.name for word in wanted):
            began = time.monotonic()
            noticed = _noticed(bug)
            missed += not noticed
            _say(f"{'noticed' if noticed else 'MISSED'}  {time.monotonic() - began:5.0f} s  {bug.name}")
    _say(f"{missed} missed")
    return missed


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _noticed(bug: Bug) -> bool:
    with tempfile.TemporaryDirectory(prefix="fxchimera-planted-") as folder:
        copy = Path(folder) / "main"
        shutil.copytree(_ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        path = copy / bug.file
        text = path.read_text()
        if text.count(bug.line) != 1:
            raise SystemExit(f"{bug.name}: {bug.line!r} occurs {text.count(bug.line)} times in {bug.file}, not once")
        path.write_text(text.replace(bug.line, bug.instead))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *bug.tests.split()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "passes")))}
        run = subprocess.run(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_SECONDS
        )
    if run.returncode not in (0, 1):
        raise SystemExit(f"{bug.name}: pytest ended with {run.returncode}\n{run.stdout[-3000:]}")
    return run.returncode == 1


if __name__ == "__main__":
    raise SystemExit(main())
