"""Training that is ended from outside: a launcher or a script is started, struck by a signal at a random moment, and watched.

torchrun (or python) --- signal ---> when are all ranks gone?  what have they printed?  which files and processes are left?
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KINDS", "Ended", "end"]

_ROOT = Path(__file__).parents[1]
_MARK = "FXCHIMERA_ENDING"
_START_SECONDS, _LIMIT_SECONDS = 120.0, 60.0
# kind -> the signal, and whether the whole process group gets it, as from a terminal
KINDS = {
    "ctrl-c": (signal.SIGINT, True),
    "ctrl-c of the parent": (signal.SIGINT, False),
    "terminated": (signal.SIGTERM, False),
    "killed": (signal.SIGKILL, False),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How training ended: seconds until the last rank was gone, and what it left.

    ``lines`` are those that our ranks printed, ``launcher`` what torchrun did; ``orphans`` are processes alive after the limit,
    ``files`` what is left in the folder for temporary files.
    """

    seconds: float
    code: int
    lines: tuple[str, ...]
    launcher: tuple[str, ...]
    orphans: tuple[int, ...]
    files: tuple[str, ...]


def end(kind: str, ranks: int, folder: Path, seed: int, *, threads: bool = False) -> Ended:
    """Start training on some ranks, end it by ``kind`` at a moment that depends on ``seed``, and watch; the folder is empty."""
    sent, whole = KINDS[kind]
    mark = uuid.uuid4().hex
    with _started(_command(ranks, folder, threads), folder, mark) as process:
        _wait_for_ranks(1 if threads else ranks, folder, process)
        time.sleep(random.Random(seed).uniform(0.0, 1.0))
        began = time.monotonic()
        if whole:
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        while any(map(_is_alive, pids)) and time.monotonic() - began < _LIMIT_SECONDS:
            time.sleep(0.02)
        seconds = time.monotonic() - began
        code = process.wait(_LIMIT_SECONDS)
    orphans = tuple(_marked(mark))
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    printed = tuple(line for path in sorted((folder / "logs").rglob("std*.log")) for line in path.read_text().splitlines())
    own = tuple((folder / "output").read_text().splitlines())
    files = tuple(sorted(path.name for path in (folder / "temporary").iterdir()))
    return Ended(seconds, code, own if threads else printed, () if threads else own, orphans, files)


def _command(ranks: int, folder: Path, threads: bool) -> list[str]:
    script = [str(_ROOT / "tests" / "process" / "endless.py"), str(folder), str(ranks)]
    if threads:
        return [sys.executable, *script]
    options = ["--standalone", "--nproc-per-node", str(ranks), "--redirects", "3", "--log-dir", str(folder / "logs")]
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


@contextmanager
def _started(command: list[str], folder: Path, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process group of its own, that is killed in the end."""
    for name in ("temporary", "logs"):
        (folder / name).mkdir()
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT / "passes"))),
        "TMPDIR": str(folder / "temporary"), "CUDA_VISIBLE_DEVICES": "", _MARK: mark,
    }  # fmt: skip
    environment.pop("FXCHIMERA_REPORTS", None)
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_heed,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _heed() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for_ranks(count: int, folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until all ranks have taken a step."""
    deadline = time.monotonic() + _START_SECONDS
    while len(list(folder.glob("*.pid"))) < count:
        if time.monotonic() > deadline or process.poll() is not None:
            printed = "\n".join(path.read_text() for path in [folder / "output", *(folder / "logs").rglob("std*.log")])
            raise AssertionError(f"training has not begun: {printed}")
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _marked(mark: str) -> Iterator[int]:
    """The processes that are alive and were started by a process with this mark."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and _is_alive(int(folder.name)):
                yield int(folder.name)
        except OSError:  # another user's, or gone
            continue
