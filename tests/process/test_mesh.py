"""One dimension of a DeviceMesh is the pipeline; the other is the caller's, who reduces over it with torch's own means."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxchimera
from tests.parity import Outcome, assert_close, assert_same_tensors, gradients_of
from tests.process.alike import union
from tests.process.grouped import over_groups
from tests.process.pool import Pool
from tests.workers import Caught, caught, owned_gradients, rank

pytestmark = pytest.mark.process

ROWS = (7, 4)


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)], nn.Linear(8, 3)).double()
    return model, torch.randn(sum(ROWS), 8).double(), torch.randn(sum(ROWS), 3).double()


def wrapped(model: nn.Module, x: torch.Tensor, mesh: DeviceMesh, **options: Any) -> fxchimera.Pipeline:
    return fxchimera.pipeline(
        model, example_args=(x[:4],), loss_fn=nn.functional.mse_loss, num_stages=2, n_microbatches=4, schedule="chimera",
        device_mesh=mesh, **options,
    )  # fmt: skip


def train(dims: tuple[str, str], name: str, *, alone: bool) -> dict[str, Any]:
    """One step on a shard of the rows; the caller averages over the other dimension.  ``alone`` passes the dimension by itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
    own = mesh[next(dim for dim in dims if dim != name)]
    try:
        model, x, y = model_and_data()
        shard = slice(0, ROWS[0]) if own.get_local_rank() == 0 else slice(ROWS[0], None)
        with wrapped(model, x, mesh[name] if alone else mesh, **({} if alone else {"pipeline_dim": name})) as pipe:
            loss = pipe.step(x[shard], target=y[shard])
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                parameter.grad *= len(x[shard]) / len(x)
                dist.all_reduce(parameter.grad, group=own.get_group())
            state = pipe.state_dict()
            return {
                "loss": loss, "gradients": owned_gradients(pipe), "own": own.get_local_rank(), "size": pipe.data_parallel_size,
                "states": len(state), "verified": pipe.verify(x[shard], target=y[shard]).bitwise,
            }  # fmt: skip
    finally:
        dist.destroy_process_group()


def refused() -> list[Caught]:
    """What does not go together with a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, x, _ = model_and_data()
    try:
        return [
            caught(lambda: wrapped(model, x, mesh, pipeline_dim="tp")),
            caught(lambda: wrapped(model, x, mesh, data_parallel=2)),
            caught(lambda: fxchimera.pipeline(model, example_args=(x,), num_stages=4, n_microbatches=4, device_mesh=mesh)),
        ]
    finally:
        dist.destroy_process_group()


def fail() -> tuple[Caught | None, bool]:
    """Pipeline (1, 3) of the second dimension "pp" fails, the other one does not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model, x, y = model_and_data()
    if rank() == 3:
        model[-1].register_forward_pre_hook(lambda module, inputs: 1 / 0 if torch.is_grad_enabled() and armed[0] else None)
    armed = [False]
    pipe = wrapped(model, x, mesh)
    try:
        armed[0] = True
        if rank() % 2:
            return caught(lambda: pipe.step(x[:4], target=y[:4])), True
        return None, bool(torch.isfinite(pipe.step(x[:4], target=y[:4])))
    finally:
        pipe.close()
        dist.destroy_process_group()


@pytest.mark.parametrize(("dims", "name", "alone"), [(("dp", "pp"), "pp", True), (("stages", "replicas"), "stages", False)])
def test_the_other_dimension_is_the_callers(processes: Pool, dims: tuple[str, str], name: str, alone: bool) -> None:
    """The pipelines are ranks 0, 1 and 2, 3 of the first mesh, and 0, 2 and 1, 3 of the second."""
    answers = processes.run(4, partial(train, dims, name, alone=alone))
    model, x, y = model_and_data()
    nn.functional.mse_loss(model(x), y).backward()
    for own in (0, 1):
        ranks = [answer for answer in answers if answer["own"] == own]
        shard = slice(0, ROWS[0]) if own == 0 else slice(ROWS[0], None)
        plain = nn.functional.mse_loss(model(x[shard]), y[shard]).detach()
        for answer in ranks:
            assert_close(
                Outcome(answer["loss"], union([one["gradients"] for one in ranks])), Outcome(plain, gradients_of(model)), 1e-12
            )
        assert [answer["states"] for answer in ranks] == [len(model.state_dict()), 0]
        assert all(answer["size"] == 1 and answer["verified"] for answer in ranks)
    first, second = [[answer["gradients"] for answer in answers if answer["own"] == own] for own in (0, 1)]
    assert_same_tensors(union(first), union(second))


def test_what_a_mesh_decides_is_not_asked_for_otherwise(processes: Pool) -> None:
    said = ["has no dimension 'tp'", "data_parallel= and rank_placement= cannot be given", "num_stages=4, but dimension 'pp'"]
    for answer in processes.run(4, refused):
        assert all(text in found for (_, found, _), text in zip(answer, said, strict=True)), answer


def test_pipelines_of_a_mesh_fail_by_themselves(processes: Pool) -> None:
    answers = processes.run(4, fail, spoils=True)
    assert all(good for _, good in answers)
    texts = {error[1] for error, _ in answers if error is not None}
    assert len(texts) == 1
    assert texts.pop().startswith("rank 1 failed: stage 1 (down), micro-batch 0")


def one_after_the_other(shape: tuple[int, int], count: int) -> list[torch.Tensor]:
    """Losses of pipelines that are made on one mesh, each after the one before was closed."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    try:
        found = []
        for _ in range(count):
            model, x, y = model_and_data()
            with fxchimera.pipeline(
                model, example_args=(x,), loss_fn=nn.functional.mse_loss, num_stages=shape[1], n_microbatches=4, schedule="1f1b",
                device_mesh=mesh,
            ) as pipe:  # fmt: skip
                found.append(pipe.step(x, target=y))
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("carry", "shape"),
    [
        ((), (2, 2)),
        pytest.param((over_groups,), (2, 2), marks=pytest.mark.matrix),
        pytest.param((over_groups,), (1, 4), marks=pytest.mark.matrix),
    ],
    ids=["sockets", "groups", "groups of four ranks"],
)
def test_pipelines_one_after_the_other_on_one_mesh(processes: Pool, carry: tuple[Any, ...], shape: tuple[int, int]) -> None:
    """Torch names groups after their ranks and how many there are: the second pipeline's would be where the first one's were."""
    model, x, y = model_and_data()
    plain = nn.functional.mse_loss(model(x), y).detach()
    for losses in processes.run(4, *carry, one_after_the_other, shape, 2):
        for loss in losses:
            torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0.0)
