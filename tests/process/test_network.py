"""Two nodes with a network between them: messages are slow, the other's processes are out of sight, a cable can be pulled.

See tests/network.py; needs the right to make network namespaces, which containers often withhold.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.network import ADDRESSES, INTERFACE, Network, reason_against

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "tutorials" / "multi_node.py"
LIMIT_SECONDS = 300.0
WAIT_SECONDS, SILENT_SECONDS = 20.0, 8.0
SLACK = 4.0

pytestmark = [pytest.mark.process, pytest.mark.matrix, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if reason := reason_against():
        pytest.skip(reason)


@contextmanager
def agents(network: Network, processes: int, what: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """One agent of torchrun on each of the two; each sees the processes of its own machine only."""
    variables = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "passes"))),
    }  # fmt: skip
    found = []
    for side, address in enumerate(ADDRESSES):
        command = [
            *network.command(side), "unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--nproc-per-node", str(processes), "--node-rank", str(side),
            "--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500",
            "--rdzv-conf", f"is_host={int(side == 0)}", "--local-addr", address, *what,
        ]  # fmt: skip
        found.append(
            subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        yield found
    finally:
        for agent in found:
            agent.kill()
            agent.wait()


@pytest.mark.parametrize(("delay", "placement"), [(0.0, "compact"), (0.005, "compact"), (0.005, "mirrors_apart")])
def test_losses_over_a_slow_network_are_bitwise_those_of_threads(
    delay: float, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--num-stages", "4", "--steps", "4", "--schedule", "chimera"]
    with Network(delay) as network, agents(network, 2, [str(TUTORIAL), *common, "--rank-placement", placement]) as running:
        texts = [agent.communicate(timeout=LIMIT_SECONDS)[0] for agent in running]
        packets = network.packets
    assert [agent.returncode for agent in running] == [0, 0], "\n".join(texts)
    (line,) = [line for text in texts for line in text.splitlines() if line.startswith("losses ")]
    monkeypatch.syspath_prepend(str(TUTORIAL.parent))
    assert list(map(float, line.split()[1:])) == importlib.import_module("multi_node").main(common)
    assert packets > 100, "the two talked over the cable"


def endings(network: Network, folder: Path, happens: str) -> dict[int, dict[str, Any]]:
    """Let something happen in the middle of the training of two machines with two ranks each; how it ended, by rank."""
    what = ["-m", "tests.process.apart", str(folder), "4", str(WAIT_SECONDS), str(SILENT_SECONDS)]
    with agents(network, 2, what) as running:
        wait_for(lambda: len(list(folder.glob("*.pid"))) == 4, running)
        time.sleep(1.0)
        victims = ranks_of(running[1])
        if happens == "cut":
            network.cut()
        else:
            for pid in victims:
                os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[happens])
        expected = 4 if happens == "cut" else 2
        wait_for(lambda: len(list(folder.glob("*.json"))) >= expected, running)
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def wait_for(there: Any, running: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not there():
        if time.monotonic() > deadline:
            for agent in running:
                agent.kill()
            pytest.fail("\n".join(agent.communicate()[0] for agent in running), pytrace=False)
        time.sleep(0.1)


def ranks_of(agent: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks of an agent: those below it that run the script themselves."""
    below, found = [agent.pid], []
    while below:
        pid = below.pop()
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            below += map(int, children.read_text().split())
        if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0LOCAL_")[0]:
            found.append(pid)
    return found


@pytest.mark.parametrize(("happens", "bar"), [("kill", 3.0), ("stop", SILENT_SECONDS + 5.0)])
def test_a_rank_of_another_machine_that_is_gone_or_frozen_is_named(happens: str, bar: float, tmp_path: Path) -> None:
    with Network(0.002) as network:
        found = endings(network, tmp_path, happens)
    assert {0, 1} <= set(found)
    for rank in (0, 1):
        assert found[rank]["error"].startswith(("rank 2 failed: ", "rank 3 failed: ")), found[rank]
        assert found[rank]["seconds"] < SLACK * bar


def test_a_pulled_cable_is_noticed_on_both_sides(tmp_path: Path) -> None:
    """Nobody is at fault, and everybody is told in bounded time whom they miss."""
    with Network(0.002) as network:
        found = endings(network, tmp_path, "cut")
    assert set(found) == {0, 1, 2, 3}
    for rank, ending in found.items():
        missed = (2, 3) if rank < 2 else (0, 1)
        assert any(f"rank {other}" in ending["error"] for other in missed), ending
        assert ending["seconds"] < WAIT_SECONDS + 10.0
        assert ending["closing"] < 20.0
