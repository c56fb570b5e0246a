"""Several agents of torchrun on this machine, as if each were a node, run a tutorial; the witness is the same file run by threads.

The agents meet in a store that this process hosts on a port that the system chose.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tutorials" / "multi_node.py"
LIMIT_SECONDS = 200.0


def by_nodes(nodes: int, processes: int, options: Sequence[str]) -> list[float]:
    """Run the tutorial by ``nodes`` agents with so many ranks each, and return the losses that rank 0 prints."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_SECONDS))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(processes),
        "--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-conf", "is_host=0",
        "--local-addr", "127.0.0.1",
    ]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "passes")))}
    agents = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), str(SCRIPT), *options],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(nodes)
    ]  # fmt: skip
    try:
        texts = [agent.communicate(timeout=LIMIT_SECONDS)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * nodes, "\n".join(texts)
    lines = [line for text in texts for line in text.splitlines() if line.startswith("losses ")]
    assert len(lines) == 1, "rank 0 alone prints"
    return [float(word) for word in lines[0].split()[1:]]


def by_threads(options: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    losses: list[float] = importlib.import_module("multi_node").main(options)
    return losses


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.matrix)


@pytest.mark.parametrize(("processes", "placement"), [(1, "compact"), slow(2, "compact"), slow(2, "mirrors_apart")])
def test_a_pipeline_over_two_nodes_is_bitwise_that_of_threads(
    processes: int, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--num-stages", str(2 * processes), "--steps", "4", "--schedule", "chimera"]
    found = by_nodes(2, processes, [*common, "--rank-placement", placement])
    assert found == by_threads(common, monkeypatch)
    assert found[-1] < found[0]


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [[], ["--zero"]])
@pytest.mark.parametrize("placement", ["compact", "mirrors_apart"])
def test_a_pipeline_on_each_of_two_nodes_is_that_of_twice_the_micro_batches(
    zero: list[str], placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss is the same to the last bit; afterwards gradients were added in another order."""
    common = ["--num-stages", "4", "--steps", "4", "--schedule", "chimera"]
    found = by_nodes(2, 4, [*common, "--rank-placement", placement, *zero])
    expected = by_threads([*common, "--n-microbatches", "8"], monkeypatch)
    assert found[0] == expected[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0.0)
