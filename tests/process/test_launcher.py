"""When torchrun is killed, its ranks end: nobody else would end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxchimera.runtime.fate import Fate, Identity

_ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS, _SLACK = 10.0, 3.0


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.mark.skipif(Identity.own().fate() is Fate.UNKNOWN, reason="the system has no /proc")
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT / "passes")))}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.process.endless",
    ]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen([*command, str(tmp_path)], cwd=_ROOT, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60.0
            while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.5)
            pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
            assert len(pids) == 2, (tmp_path / "log").read_text()
        finally:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
    began = time.monotonic()
    while any(map(is_alive, pids)) and time.monotonic() - began < _SLACK * _LIMIT_SECONDS:
        time.sleep(0.1)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert f"its launcher, torchrun (process {launcher.pid}), is gone" in (tmp_path / "log").read_text()
