"""What the ranks of several pipelines side by side do in tests, and what plain torch gives for all shards together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxchimera
from tests.local.wrapped import wrap
from tests.models import MODELS, Example
from tests.parity import Outcome, gradients_of, split
from tests.workers import Caught, caught, owned_gradients, rank, step, threads

__all__ = [
    "expected_steps", "fail_in_forward", "forget_to_shard", "mistakes", "not_finite", "refused", "shards", "train", "train_apart",
    "train_routed", "use_everything",
]  # fmt: skip


def shards(name: str, rows: Sequence[int], **options: Any) -> list[Example]:
    """Examples of one model on consecutive rows of one batch."""
    whole, found, start = MODELS[name](batch=sum(rows), **options), [], 0
    for count in rows:
        cut = slice(start, start + count)
        found.append(
            whole._replace(
                args=tuple(value[cut] for value in whole.args),
                kwargs={key: value[cut] for key, value in whole.kwargs.items()},
                target=None if whole.target is None else whole.target[cut],
            )
        )
        start += count
    return found


def own_shard(name: str, rows: Sequence[int], **options: Any) -> Example:
    """The shard of this process's pipeline."""
    return shards(name, rows, **options)[rank() * len(rows) // int(os.environ["WORLD_SIZE"])]


def expected_steps(name: str, rows: Sequence[int], n: int, steps: int, times: int = 1) -> tuple[list[Outcome], dict[str, Tensor]]:
    """AdamW steps of the plain model, micro-batch by micro-batch over all shards; each step's gradients, and the state at the end.

    With ``times`` every step sees the batch so often.
    """
    pieces = [piece for shard in shards(name, rows, dtype=torch.float64) for piece in split(shard, n)]
    model, found = pieces[0].model, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for piece in pieces * times:
            output = model(*piece.args, **piece.kwargs)
            part = piece.loss(output) * (len(tensor_of(piece)) / sum(rows))
            part.backward()
            loss += part.detach()
        found.append(Outcome(loss / times, gradients_of(model)))
        optimizer.step()
    return found, model.state_dict()


def tensor_of(example: Example) -> Tensor:
    """Some tensor with the rows of an example."""
    found: Tensor = next(iter((*example.args, *example.kwargs.values())))
    return found


def train(
    name: str, rows: Sequence[int], stages: int, n: int, schedule: str, *, steps: int = 5, skipped: int = 0, **options: Any
) -> dict[str, Any]:
    """AdamW steps on this pipeline's shard, the first ``skipped`` batches of each under no_sync; ``options`` are the model's."""
    example = own_shard(name, rows, **{"dtype": torch.float64, **options})
    losses, gradients = [], {}
    with wrap(example, stages, n, schedule) as pipe:
        start = {key: value.detach().clone() for key, value in pipe.named_parameters()}
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for number in range(steps):
            with pipe.no_sync():
                for _ in range(skipped):
                    step(pipe, example)
            losses.append(step(pipe, example))
            if number == 0:
                gradients = owned_gradients(pipe)
            norm = pipe.clip_grad_norm_(1e3)
            optimizer.step()
            optimizer.zero_grad()
        result = pipe.verify(*example.args, target=example.target, **example.kwargs)
        owned = {key: value.clone() for key, value in pipe.state_dict(full=False).items()}
        place = (pipe.data_parallel_rank, pipe.data_parallel_size)
        state = pipe.state_dict()
    return {
        "losses": losses, "gradients": gradients, "norm": norm, "verified": (result.bitwise, str(result)), "owned": owned,
        "state": state, "place": place, "start": start, "threads": threads(),
    }  # fmt: skip


def train_apart(rows: Sequence[int]) -> tuple[tuple[int, list[str]], Tensor, dict[str, Tensor | None], int]:
    """One step of two pipelines of two ranks on two nodes, mirrors apart; the pipeline, what is owned, loss and gradients."""
    os.environ["GROUP_RANK"] = str(rank() // 2)  # as two agents of torchrun would set it
    example = shards("mlp", rows, dtype=torch.float64)[rank() % 2]
    with wrap(example, 2, 2, rank_placement="mirrors_apart") as pipe:
        loss = step(pipe, example)
        place = pipe.data_parallel_rank, sorted(name for name, _ in pipe.named_parameters())
        return place, loss, owned_gradients(pipe), len(pipe.state_dict())


# ---------------------------------------------------------------------- models that the shards take different ways through


class Routed(nn.Module):
    """Rows with a positive first value make the whole micro-batch go through one layer, else through another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        positive = h[:, 0].sum() * 0 + x[:, 0].sum() > 0
        return self.last(self.one(h) if positive else self.other(h))


def routed() -> tuple[nn.Module, Tensor, Tensor]:
    """The model, with all first values of the first half of the rows positive and of the second half negative."""
    torch.manual_seed(3)
    model = Routed().double()
    x, y = torch.randn(16, 6).double(), torch.randn(16, 3).double()
    x[:8, 0], x[8:, 0] = x[:8, 0].abs(), -x[8:, 0].abs()
    return model, x, y


def train_routed(ways: Sequence[int]) -> tuple[Tensor, dict[str, Tensor | None], Tensor, dict[str, Tensor | None]]:
    """One step where pipeline w takes way ``ways[w]`` (0: positive); found and expected loss and gradients."""
    model, x, y = routed()
    pieces = [(x[8 * way : 8 * way + 8], y[8 * way : 8 * way + 8]) for way in ways]
    loss = sum(nn.functional.mse_loss(model(a), b) for a, b in pieces) / len(pieces)
    assert isinstance(loss, Tensor)
    loss.backward()
    expected = gradients_of(model)
    model, x, _ = routed()
    mine = pieces[rank() // 2]
    with fxchimera.pipeline(
        model, example_args=(x[:8],), loss_fn=nn.functional.mse_loss, num_stages=2, n_microbatches=2, schedule="1f1b"
    ) as pipe:
        found = pipe.step(mine[0], target=mine[1])
        gradients = owned_gradients(pipe)
    return found, gradients, loss.detach(), expected


# ---------------------------------------------------------------------- the rest of the interface, and mistakes


def use_everything(stages: int, n: int) -> dict[str, Any]:
    """Weights of another seed on every rank; forward, evaluation, state, pictures and profile."""
    rows = (7, 4)
    example = own_shard("mlp", rows)
    example = example._replace(model=MODELS["mlp"](seed=rank()).model)
    with wrap(example, stages, n) as pipe:
        start = pipe.state_dict()
        pipe.eval()
        output = pipe(*example.args)
        loss = pipe.evaluate(*example.args, target=example.target)
        pipe.train()
        pipe.load_state_dict({key: value * 2 for key, value in start.items()})
        loaded = pipe.state_dict()
        step(pipe, example)
        profile = pipe.profile(*example.args, target=example.target, rounds=1)
        events = {event.rank for event in pipe.draw().timelines[-1].events}
        made = pipe.warmup((torch.cat(example.args * 4)[: 5 * n],))
        owned = {key: value.clone() for key, value in pipe.state_dict(full=False).items()}
    return {
        "start": start, "output": output, "loss": loss, "loaded": loaded, "profiled": len(profile.stages), "ranks": events,
        "made": made, "owned": owned,
    }  # fmt: skip


def mistakes(kind: str) -> Caught:
    """What a mistake in pipeline 1 gives on every rank; a good step must still be possible afterwards."""
    example, odd = own_shard("mlp", (8, 8)), rank() // 2 == 1
    x, target = example.args[0], example.target
    assert target is not None
    with wrap(example, 2, 4) as pipe:

        def wrong() -> Any:
            if kind == "batch":
                return pipe.step(x[: 6 if rank() == 3 else 8], target=target[: 6 if rank() == 3 else 8])
            if kind == "values":
                return pipe.step(x + (rank() == 3), target=target)
            if kind == "rows":
                return pipe.step(x[: 2 if odd else 8], target=target[: 2 if odd else 8])
            if kind == "loss_scale":
                return pipe.step(x, target=target, loss_scale=2.0 if odd else 1.0)
            return pipe.evaluate(x, target=target) if odd else pipe.step(x, target=target)

        error = caught(wrong)
        assert torch.isfinite(step(pipe, example))
    return error


def forget_to_shard() -> bool:
    """Every pipeline gets the whole batch; whether this rank warns of that."""
    example = MODELS["mlp"](batch=8)
    with wrap(example, 2, 4) as pipe, warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        step(pipe, example)
    return any("all 2 pipelines were given the same batch" in str(one.message) for one in caught_warnings)


def not_finite() -> tuple[Caught, int, bool]:
    """A row of micro-batch 2 of pipeline 1 is infinite; the error, how many gradients are there then, and a good step."""
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    x, y = torch.zeros(8, 6), torch.zeros(8, 6)
    bad = y.clone()
    bad[4, 0] = float("inf") if rank() // 2 else 0.0
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=nn.functional.l1_loss, num_stages=2, n_microbatches=4, schedule="chimera"
    ) as pipe:
        error = caught(lambda: pipe.step(x, target=bad))
        left = sum(parameter.grad is not None for parameter in pipe.parameters())
        return error, left, bool(torch.isfinite(pipe.step(x, target=y)))


def fail_in_forward() -> tuple[Caught, Caught]:
    """A module of the user's raises on one rank of pipeline 1; what every rank raises then, and afterwards."""
    example = own_shard("mlp", (8, 8))
    calls = [0]

    def hook(module: nn.Module, inputs: Any) -> None:
        calls[0] += 1
        if rank() == 3 and calls[0] > 2:
            raise ValueError("planted mistake")

    example.model[-1].register_forward_pre_hook(hook)  # type: ignore[operator]
    pipe = wrap(example, 2, 4, "1f1b")
    try:
        return caught(lambda: step(pipe, example)), caught(lambda: step(pipe, example))
    finally:
        pipe.close()


def refused(kind: str) -> Caught:
    """Models and numbers that data parallelism does not take."""
    example = own_shard("mlp", (8, 8))
    if kind == "width":
        return caught(lambda: wrap(example, 2, 4, data_parallel=3))
    if kind == "sparse":
        model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        ids, y = torch.randint(20, (8,)), torch.randn(8, 3)
        sparse = Example(model, (ids,), {}, y, nn.functional.mse_loss)
        pipe = wrap(sparse, 2, 4, "1f1b")
        try:
            return caught(lambda: step(pipe, sparse))
        finally:
            pipe.close()
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))[
            "dp"
        ]  # by the caller, who does not say which dimension is the pipeline
        try:
            return caught(
                lambda: wrap(example, 2, 4, "1f1b", parallelize=lambda module, **_: fully_shard(module, mesh=mesh) and None)
            )
        finally:
            dist.destroy_process_group()
    return caught(lambda: wrap(example._replace(model=Counting(example.model)), 2, 4, "1f1b"))


class Counting(nn.Module):
    """Writes a buffer in forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.inner(x - self.mean)
