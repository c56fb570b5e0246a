"""What torch's runtime would get wrong with our stages is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from fxchimera.errors import BatchError, FxChimeraError, PartitionError, ScheduleError
from fxchimera.interop import TorchRunner, torch_stages
from tests.models import MODELS


class Gated(nn.Module):
    """Takes one of two ways, by a value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        way = self.first if x.sum() > 0 else self.second
        return way(x) * scale


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def runner(model: nn.Module, x: Tensor, n: int) -> TorchRunner:
    cut = torch_stages(model, example_args=(x,), num_stages=1, n_microbatches=n)
    return cut.runner(0, Schedule1F1B, loss_fn=F.mse_loss)


def test_parameters_of_two_stages_are_refused_by_name() -> None:
    example = MODELS["tied"]()
    with pytest.raises(FxChimeraError, match=r"stages 0 and 1 read parameter '\S+', and torch\.distributed\.pipelining does not"):
        torch_stages(example.model, example_args=example.args, example_kwargs=example.kwargs, num_stages=2, n_microbatches=2)


def test_fewer_pieces_than_stages_are_refused() -> None:
    with pytest.raises(PartitionError, match="torch's stages must not be empty; ask for fewer"):
        torch_stages(nn.Linear(2, 2), example_args=(torch.zeros(2, 2),), num_stages=2, n_microbatches=2)


def test_two_copies_are_refused() -> None:
    with pytest.raises(ScheduleError, match="'chimera' has 2 pipes"):
        torch_stages(nn.Linear(2, 2), example_args=(torch.zeros(2, 2),), num_stages=2, n_microbatches=2, schedule="chimera")


@pytest.mark.usefixtures("alone")
def test_uneven_micro_batches_are_refused_and_train_nothing() -> None:
    model = nn.Linear(3, 3)
    runs = runner(model, torch.randn(4, 3), 2)
    with pytest.raises(BatchError, match=r"micro-batch 0 has tensors \['float32\[3, 3\]'\], the example has \['float32\[2, 3\]'\]"):
        runs.step(torch.randn(5, 3), target=torch.randn(5, 3))
    assert model.weight.grad is None


@pytest.mark.usefixtures("alone")
def test_another_path_is_refused_with_the_users_line() -> None:
    model = Gated()
    runs = runner(model, torch.ones(4, 4), 2)
    x = torch.ones(4, 4)
    loss = runs.step(x, target=x)
    torch.testing.assert_close(loss, F.mse_loss(model(x), x).detach())
    x[2:] = -1.0
    with pytest.raises(BatchError, match=r"micro-batch 1 takes another path .*test_interop\.py:\d+"):
        runs.step(x, target=x)


@pytest.mark.usefixtures("alone")
def test_another_plain_value_is_refused() -> None:
    model = Gated()
    runs = runner(model, torch.ones(2, 4), 1)
    with pytest.raises(BatchError, match="the same plain values"):
        runs.step(torch.ones(2, 4), target=torch.ones(2, 4), scale=2.0)


@pytest.mark.usefixtures("alone")
def test_micro_batches_count_by_their_targets() -> None:
    """An ignore_index: the mean over the batch's real targets, which torch's own mean of means is not."""
    model, x = nn.Linear(3, 5), torch.randn(4, 3)
    target = torch.tensor([1, -100, 2, 3])
    cut = torch_stages(model, example_args=(x,), num_stages=1, n_microbatches=2)
    loss = cut.runner(0, Schedule1F1B, loss_fn=F.cross_entropy).step(x, target=target)
    expected = F.cross_entropy(model(x), target)
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.weight.grad, gradient)


@pytest.mark.usefixtures("alone")
def test_gradients_of_several_steps_add_up() -> None:
    """Under torch's own scaling the second step would divide the first one's gradient again."""
    model, (x, y) = nn.Linear(3, 3), torch.randn(2, 4, 3)
    (gradient,) = torch.autograd.grad(F.mse_loss(model(x), y), [model.weight])
    runs = runner(model, x, 4)
    for _ in range(3):
        runs.step(x, target=y)
    torch.testing.assert_close(model.weight.grad, 3 * gradient)


@pytest.mark.usefixtures("alone")
def test_a_batch_dimension_that_is_not_the_first() -> None:
    model, x = nn.Linear(3, 3), torch.randn(5, 4, 3)
    cut = torch_stages(model, example_args=(x,), num_stages=1, n_microbatches=2, args_chunk_spec=[TensorChunkSpec(1)])
    loss = cut.runner(0, Schedule1F1B, loss_fn=lambda output: output.square().mean()).step(x)
    torch.testing.assert_close(loss, model(x).square().mean().detach())
