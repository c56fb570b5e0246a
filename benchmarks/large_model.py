"""What it takes to plan a Llama of 70 billion parameters on this machine, without its weights.

    python benchmarks/large_model.py --stages 8 16 32 64          one line each, or --json

Each plan is ``fxchimera plan benchmarks/large_model.py:build`` in a process of its own, with the default schedule (a search for
cut, order and shape) and N = 2D micro-batches of one row of 4096 tokens.  Seconds are wall and processor time of that process, from
its start to its end, imports included; memory is the most that it held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

__all__ = ["build", "measure"]

LENGTH, MOST_ROWS = 4096, 128


def build() -> tuple[Any, tuple[()], dict[str, torch.Tensor]]:
    """Llama 3 70B in bfloat16 on the meta device, and a batch of 128 rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(MOST_ROWS, LENGTH, dtype=torch.int64, device="meta")
    return model, (), {"input_ids": tokens, "labels": tokens}


def measure(stages: int, microbatches: int) -> dict[str, Any]:
    """Plan in a process; returns its seconds, its memory in bytes, and the plan."""
    command = [sys.executable, "-m", "fxchimera", "plan", f"{__file__}:build", "--json"]
    command += ["--stages", str(stages), "--microbatches", str(microbatches)]
    rows = f"int64[{microbatches}, {LENGTH}]"
    command += ["--input", f"input_ids={rows}", "--input", f"labels={rows}"]
    read, write = os.pipe()
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=write) as process:
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "stages": stages,
        "microbatches": microbatches,
        "wall_seconds": time.perf_counter() - begin,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "plan": json.loads(text),
    }


def main() -> None:
    """Print a line for each number of stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--json", action="store_true", help="print one JSON object for each number of stages")
    args = parser.parse_args()
    for stages in args.stages:
        found = measure(stages, 2 * stages)
        plan = found["plan"]
        if args.json:
            print(json.dumps(found))
            continue
        heaviest = max(stage["parameter_bytes"] for stage in plan["stages"]) / 2**30
        print(
            f"D={stages} N={2 * stages}: {len(plan['stages'])} stages, the largest {heaviest:.1f} GiB; "
            f"planned in {found['wall_seconds']:.0f} s ({found['processor_seconds']:.0f} s processor), "
            f"{found['peak_bytes'] / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
