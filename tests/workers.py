"""What the ranks of a test do: functions that run in every process of a pool, and unchanged in one process with ranks as threads.

They return plain values and tensors, so that the test compares what the two kinds of run give.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxchimera import Pipeline
from tests.local.wrapped import wrap
from tests.models import MODELS, Example

__all__ = [
    "Caught", "adopted_group", "call_differently", "differ_in_batch", "differ_in_model", "evaluate_between", "exercise_state",
    "fail_in_hook", "forward", "hang", "no_sync", "rank", "train", "unowned_parameters", "verify", "wrong_world",
]  # fmt: skip

Caught = tuple[str, str, float]  # class, message, seconds until it came


def rank() -> int:
    """This process's rank; 0 when ranks are threads."""
    return int(os.environ.get("RANK", "0"))


def hang() -> None:
    """Rank 1 does not come back for a long time."""
    if rank() == 1:
        time.sleep(600.0)


def caught(call: Callable[[], Any]) -> Caught:
    """Call, and return the error that must come."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("no error was raised")


def threads() -> list[str]:
    """Names of the helper threads that are alive."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("fxchimera"))


def owned_gradients(pipe: Pipeline) -> dict[str, Tensor | None]:
    """Copies of the gradients that this process owns."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}


def step(pipe: Pipeline, example: Example) -> Tensor:
    """One step on the example's batch."""
    return pipe.step(*example.args, target=example.target, **example.kwargs)


def train(
    name: str,
    stages: int,
    n: int,
    schedule: str,
    *,
    dropout: float = 0.2,
    skew: bool = False,
    state: Any = None,
    recompute: Any = "auto",
) -> dict[str, Any]:
    """Three optimizer steps with clipping; returns losses, first gradients, norms and the full state (rank 0's).

    With ``skew`` every process builds its weights from another seed.  ``state`` is loaded first.
    """
    example = MODELS[name](batch=2 * n + 1, dropout=dropout)
    if skew:
        example = example._replace(model=MODELS[name](seed=rank(), dropout=dropout).model)
    losses, norms, gradients = [], [], {}
    with wrap(example, stages, n, schedule, recompute=recompute) as pipe:
        if state is not None:
            pipe.load_state_dict(state if rank() == 0 else {})
        start = pipe.state_dict()
        owner = {key: stage.index for stage in pipe.plan.stages for key in stage.owned}
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for number in range(3):
            losses.append(step(pipe, example))
            if number == 0:
                gradients = owned_gradients(pipe)
            norms.append(pipe.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
        final = pipe.state_dict()
    return {
        "losses": losses, "norms": norms, "gradients": gradients, "state": final, "threads": threads(), "start": start,
        "owner": owner,
    }  # fmt: skip


def forward(name: str, stages: int, n: int) -> tuple[Tensor, Tensor]:
    """Forward-only output and validation loss."""
    example = MODELS[name](batch=2 * n + 1)
    with wrap(example, stages, n) as pipe:
        pipe.eval()
        output = pipe(*example.args, **example.kwargs)
        return output, pipe.evaluate(*example.args, target=example.target, **example.kwargs)


def verify(name: str, stages: int, n: int) -> tuple[bool, str]:
    """Whether the pipeline finds itself equal to the plain model, and its report."""
    example = MODELS[name](batch=2 * n + 1, dropout=0.2)
    with wrap(example, stages, n) as pipe:
        result = pipe.verify(*example.args, target=example.target, **example.kwargs)
        return result.bitwise, str(result)


def no_sync(name: str, stages: int, n: int) -> dict[str, Any]:
    """Two steps without the exchange and one with it; returns losses, gradients and buffers."""
    example = MODELS[name](batch=2 * n + 1, dropout=0.2)
    with wrap(example, stages, n) as pipe:
        with pipe.no_sync():
            losses = [step(pipe, example) for _ in range(2)]
        losses.append(step(pipe, example))
        gradients = owned_gradients(pipe)
        buffers = {key: value for key, value in pipe.state_dict().items() if key not in dict(example.model.named_parameters())}
    return {"losses": losses, "gradients": gradients, "buffers": buffers}


def evaluate_between(name: str, stages: int, n: int, plan: str) -> dict[str, Any]:
    """Trains (T), evaluates (E), and evaluates another batch size (O), in the order of ``plan``; returns losses and state."""
    example = MODELS[name](batch=2 * n + 1, dropout=0.2)
    other = MODELS[name](batch=n + 1)
    trained, evaluated = [], []
    with wrap(example, stages, n) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for letter in plan:
            if letter == "T":
                trained.append(step(pipe, example))
                optimizer.step()
                optimizer.zero_grad()
            else:
                batch = example if letter == "E" else other
                evaluated.append(pipe.evaluate(*batch.args, target=batch.target, **batch.kwargs))
        state = pipe.state_dict()
    return {"trained": trained, "evaluated": evaluated, "state": state}


# ---------------------------------------------------------------------- state


def unowned_parameters(name: str, stages: int) -> tuple[dict[str, bool], list[str], Caught]:
    """Which parameters are meta tensors after wrapping, which are owned, and what using the plain model gives."""
    example = MODELS[name](batch=2 * stages)
    with wrap(example, stages, stages) as pipe:
        metas = {key: parameter.is_meta for key, parameter in example.model.named_parameters()}
        owned = [key for key, _ in pipe.named_parameters()]
        return metas, owned, caught(lambda: example.model(*example.args, **example.kwargs))


def exercise_state(name: str, stages: int, state: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any], Caught]:
    """Loads ``state`` (rank 0 has it), and returns the full and the owned state, and what a wrong one gives."""
    example = MODELS[name](batch=2 * stages, seed=5)
    with wrap(example, stages, stages) as pipe:
        if state is not None:
            pipe.load_state_dict(state if rank() == 0 else {})
        wrong = caught(lambda: pipe.load_state_dict({"nonsense": torch.zeros(1)}))
        owned = {key: value.clone() for key, value in pipe.state_dict(full=False).items()}
        return pipe.state_dict(), owned, wrong


# ---------------------------------------------------------------------- mistakes


def fail_in_hook(stages: int, schedule: str, bad_rank: int, bad_call: int) -> dict[str, Any]:
    """One good step, then the user's hook raises on one rank; returns what every rank raises then and afterwards."""
    example = MODELS["mlp"](batch=8)
    armed = [False]
    calls = [0]

    def hook(module: nn.Module, inputs: Any) -> None:
        calls[0] += 1
        if armed[0] and rank() == bad_rank and calls[0] == bad_call:
            raise ValueError("planted mistake")

    linears = [module for module in example.model.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.register_forward_pre_hook(hook)
    pipe = wrap(example, stages, 4, schedule)
    try:
        step(pipe, example)
        before = owned_gradients(pipe)
        armed[0], calls[0] = True, 0
        first = caught(lambda: step(pipe, example))
        return {"first": first, "again": caught(lambda: step(pipe, example)), "before": before, "after": owned_gradients(pipe)}
    finally:
        start = time.monotonic()
        pipe.close()
        assert time.monotonic() - start < 10.0


def wrong_world(stages: int) -> tuple[Caught, bool]:
    """Wraps for another number of ranks than there are; also tells whether a process group was left behind."""
    error = caught(lambda: wrap(MODELS["mlp"](batch=8), stages, 4))
    return error, dist.is_initialized()


def differ_in_batch(kind: str) -> Caught:
    """Rank 1 passes another batch than rank 0; a good step must still be possible afterwards."""
    example = MODELS["mlp"](batch=8)
    x, target = example.args[0], example.target
    assert target is not None
    with wrap(example, 2, 4) as pipe:
        if rank() == 1:
            x = {"rows": x[:6], "width": x[:, :8], "dtype": x.double(), "too few rows": x[:2]}[kind]
            target = target[: x.shape[0]]
        error = caught(lambda: pipe.step(x, target=target))
        assert torch.isfinite(step(pipe, example))
    return error


def call_differently() -> Caught:
    """Rank 0 steps while rank 1 evaluates."""
    example = MODELS["mlp"](batch=8)
    with wrap(example, 2, 4) as pipe:
        call = pipe.evaluate if rank() == 1 else pipe.step
        error = caught(lambda: call(*example.args, target=example.target))
        assert torch.isfinite(step(pipe, example))
    return error


def differ_in_model(kind: str) -> Caught:
    """Rank 1 wraps another model, or with other options, than rank 0."""
    odd = rank() == 1
    if kind == "model":
        return caught(lambda: wrap(MODELS["skip" if odd else "mlp"](batch=8), 2, 4))
    return caught(lambda: wrap(MODELS["mlp"](batch=12), 2, 6 if odd else 4))


# ---------------------------------------------------------------------- groups


def adopted_group() -> tuple[bool, list[str], float, list[Caught]]:
    """With a process group of the user's: twice wrap, step, close, close; then whether the group is there, threads, and a sum.

    The closed pipeline is used once more, which must be refused.
    """
    dist.init_process_group("gloo")
    try:
        for _ in range(2):
            example = MODELS["mlp"](batch=8)
            pipe = wrap(example, 2, 4)
            step(pipe, example)
            pipe.close()
            pipe.close()
        refused = [caught(lambda: step(pipe, example)), caught(pipe.state_dict)]
        alive = dist.is_initialized()
        total = torch.ones(1)
        dist.all_reduce(total)
        return alive, threads(), float(total), refused
    finally:
        dist.destroy_process_group()
