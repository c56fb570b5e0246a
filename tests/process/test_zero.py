"""torch's ZeroRedundancyOptimizer over the pipelines: ZeRO-1 with nothing of our own but the group."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fxchimera
from tests.parity import assert_same_tensors
from tests.process.pool import Pool
from tests.workers import rank

pytestmark = pytest.mark.process


def deep() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)], nn.Linear(8, 4)).double()


def bare() -> nn.Module:
    """Every rank owns one parameter, so that one pipeline keeps no state at all."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()


def train(make: Any, stages: int, *, sharded: bool) -> dict[str, Any]:
    """Five AdamW steps with clipping; what is owned then, and for how many parameters this rank keeps optimizer state."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 8, generator=generator).double(), torch.randn(24, 4, generator=generator).double()
    x, y = x.chunk(4 // stages)[rank() // stages], y.chunk(4 // stages)[rank() // stages]
    with fxchimera.pipeline(
        make(), example_args=(x,), loss_fn=nn.functional.mse_loss, num_stages=stages, n_microbatches=4, schedule="1f1b"
    ) as pipe:
        optimizer: Any
        if sharded:
            optimizer = ZeroRedundancyOptimizer(
                pipe.parameters(), optimizer_class=torch.optim.AdamW, process_group=pipe.data_parallel_group, lr=1e-2
            )
        else:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for _ in range(5):
            pipe.step(x, target=y)
            pipe.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        owned = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        whole: dict[str, Any] = {"state": {}}
        kept = len((optimizer.optim if sharded else optimizer).state)
        if sharded:
            optimizer.consolidate_state_dict(to=0)
        if sharded and pipe.data_parallel_rank == 0:
            whole = optimizer.state_dict()
    return {"owned": owned, "kept": kept, "whole": len(whole["state"])}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.matrix)


@pytest.mark.parametrize(("make", "stages"), [(deep, 2), slow(bare, 2), slow(deep, 1)])
def test_sharded_optimizer_state_trains_bit_for_bit_as_the_whole(processes: Pool, make: Any, stages: int) -> None:
    plain = processes.run(4, partial(train, make, stages, sharded=False))
    sharded = processes.run(4, partial(train, make, stages, sharded=True))
    for number, (found, expected) in enumerate(zip(sharded, plain, strict=True)):
        assert_same_tensors(found["owned"], expected["owned"])
        assert found["whole"] == (len(found["owned"]) if number < stages else 0)
    for number in range(stages):
        column = sharded[number::stages]
        assert sum(answer["kept"] for answer in column) == len(column[0]["owned"]), "every state is kept once"


def resume(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Five steps, and three steps, a checkpoint, and two more by a new pipeline; what is owned then."""
    found = []
    x, y = torch.ones(8, 8).double() * (1 + rank() // 2), torch.zeros(8, 4).double()
    for parts in ((5,), (3, 2)):
        for number, steps in enumerate(parts):
            with fxchimera.pipeline(
                deep(), example_args=(x,), loss_fn=nn.functional.mse_loss, num_stages=2, n_microbatches=4, schedule="1f1b"
            ) as pipe:
                optimizer = ZeroRedundancyOptimizer(
                    pipe.parameters(), optimizer_class=torch.optim.AdamW, process_group=pipe.data_parallel_group, lr=1e-2
                )
                if number:
                    pipe.load(folder, optimizer=optimizer)
                for _ in range(steps):
                    pipe.step(x, target=y)
                    optimizer.step()
                    optimizer.zero_grad()
                if steps == 3:
                    pipe.save(folder, optimizer=optimizer)
                owned = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        found.append(owned)
    return found[0], found[1]


def test_training_goes_on_from_a_checkpoint_of_sharded_state(processes: Pool, tmp_path: Path) -> None:
    for straight, resumed in processes.run(4, resume, str(tmp_path / "checkpoint")):
        assert_same_tensors(resumed, straight)
