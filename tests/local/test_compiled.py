"""Stages through ``torch.compile``, and modules that the user has compiled.

The witness is the compiled plain model, micro-batch by micro-batch; the bar is float32's.  ``aot_eager`` compiles as the default
backend does, but for the kernels, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera import FxChimeraError
from fxchimera.runtime.stages.compiled import CompiledStage
from fxchimera.schedule.action import Kind
from tests.local.toys import chain, data, wrapped
from tests.local.wrapped import step, wrap
from tests.models import MODELS, Example, seeded
from tests.parity import TOLERANCE, Outcome, assert_bitwise, assert_close, gradients_of, split

QUICK = {"backend": "aot_eager"}
WIDTH = 8


@pytest.fixture(autouse=True)
def watched_stages() -> None:
    """The check of this folder watches operators one by one, which a compiled stage does not have."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.b(F.gelu(self.a(x))))


def small(build: Callable[[], nn.Module]) -> Example:
    with seeded(0) as generator:
        model = build().train()
        x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    return Example(model, (x,), {}, y, F.mse_loss)


def plain_loop(example: Example, model: Any, n: int) -> Outcome:
    total = torch.zeros(())
    for piece in split(example, n):
        loss = piece.loss(model(*piece.args, **piece.kwargs)) / n
        loss.backward()
        total = total + loss.detach()
    return Outcome(total, gradients_of(example.model))


def stages_of(pipe: fxchimera.Pipeline) -> list[Any]:
    replicas = [replica for executor in pipe._engine.executors for replica in executor.replicas.values()]
    return [stage for replica in replicas for stage in replica._bound.values()]


def matrix() -> list[Any]:
    cells = [(name, schedule, "aot_eager") for name in MODELS for schedule in ("chimera", "zbv", "1f1b")]
    cells += [(name, schedule, "inductor") for name in ("mlp", "gpt2", "resnet") for schedule in ("chimera", "zb-h1")]
    return [pytest.param(*cell, marks=pytest.mark.matrix) for cell in cells]


@pytest.mark.parametrize(("name", "schedule", "backend"), matrix())
def test_compiled_stages_equal_the_compiled_plain_model(name: str, schedule: str, backend: str) -> None:
    witness = MODELS[name](batch=8)
    expected = plain_loop(witness, torch.compile(witness.model, backend=backend), 4)
    with wrap(example := MODELS[name](batch=8), 2, 4, schedule, compile={"backend": backend}) as pipe:
        found = step(pipe, example)
        stages = stages_of(pipe)
        torch.testing.assert_close(dict(example.model.named_buffers()), dict(witness.model.named_buffers()))
        example.model.zero_grad()
        assert_bitwise(step(pipe, example), found)
    assert stages
    assert all(isinstance(stage, CompiledStage) for stage in stages)
    assert_close(found, expected, TOLERANCE[torch.float32])


def test_batch_norm_in_both_copies() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        )

    ours, witness = small(build), small(build)
    expected = plain_loop(witness, witness.model, 4)
    with wrap(ours, 2, 4, "chimera", compile=QUICK) as pipe:
        assert_close(step(pipe, ours), expected, TOLERANCE[torch.float32])
        assert {type(stage) for stage in stages_of(pipe)} == {CompiledStage}
    torch.testing.assert_close(dict(ours.model.named_buffers()), dict(witness.model.named_buffers()))


def test_random_numbers_are_the_same_from_run_to_run_and_differ_from_step_to_step() -> None:
    def run(seed: int) -> list[Outcome]:
        model = small(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)))
        with wrap(model, 2, 2, "chimera", compile=QUICK, seed=seed) as pipe:
            found = []
            for _ in range(2):
                found.append(step(pipe, model))
                model.model.zero_grad()
        return found

    state = torch.get_rng_state()
    first, again, other = run(1), run(1), run(2)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first, again, strict=True):
        assert_bitwise(a, b)
    assert len({float(outcome.loss) for outcome in (*first, *other)}) == 4


def test_evaluation_and_autocast() -> None:
    example, witness = (small(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())) for _ in range(2))
    with wrap(example, 2, 2, "chimera", compile=QUICK) as pipe:
        loss = pipe.evaluate(*example.args, target=example.target)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = step(pipe, example)
        with torch.no_grad():
            expected = witness.loss(witness.model.eval()(*witness.args))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = witness.loss(witness.model.train()(*witness.args))
    plain.backward()
    assert_close(mixed, Outcome(plain.detach(), gradients_of(witness.model)), 5e-2, 1e-2)


class Scoped(nn.Module):
    """Surroundings of its own around some calls, in a forward that is recorded call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                gate = torch.sigmoid(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = layer(x)
            x = y.float() * gate
        return x


def test_surroundings_do_not_break_the_graph() -> None:
    ours, witness = small(Scoped), small(Scoped)
    expected = plain_loop(witness, witness.model, 2)
    with wrap(ours, 2, 2, "chimera", compile={**QUICK, "fullgraph": True}) as pipe:
        assert_close(step(pipe, ours), expected, TOLERANCE[torch.float32])


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(y) if y.mean() > 0 else torch.relu(y) + 0.1 * y
        return x


def test_stages_that_check_assumed_answers_stay_as_they_are() -> None:
    ours, witness = small(Choosing), small(Choosing)
    expected = plain_loop(witness, witness.model, 2)
    with pytest.warns(UserWarning, match="stage 0 runs uncompiled"):
        pipe = wrap(ours, 2, 2, "chimera", compile=QUICK)
    with pipe:
        assert_close(step(pipe, ours), expected, TOLERANCE[torch.float32])


def test_the_search_knows_that_nothing_can_be_split() -> None:
    x, _ = data(16)
    kinds = []
    for compiled in (False, QUICK):
        with wrapped(chain(16), x, num_stages=4, n_microbatches=8, schedule="auto", compile=compiled) as pipe:
            kinds.append({action.kind for rank in pipe.plan.order.ranks for action in rank})
            costs = pipe.plan.costs
    assert Kind.W in kinds[0]
    assert Kind.W not in kinds[1] or not any(costs.weight_grad)


# ---------------------------------------------------------------------- modules that the user has compiled


def called(block: nn.Module) -> nn.Module:
    block.compile(**QUICK)
    return block


@pytest.mark.parametrize("compiled", [called, lambda block: torch.compile(block, **QUICK)], ids=["compile()", "torch.compile"])
def test_compiled_modules_are_leaves_and_stay_compiled_in_both_copies(compiled: Callable[[nn.Module], nn.Module]) -> None:
    ours, witness = (small(lambda: nn.Sequential(*(compiled(Block()) for _ in range(4)))) for _ in range(2))
    expected = plain_loop(witness, witness.model, 4)
    seen: list[str] = []
    with wrap(ours, 2, 4, "chimera") as pipe:
        clones = [r._clones for e in pipe._engine.executors for r in e.replicas.values() if r.pipe and r._clones is not None]
        for clone in clones:
            for module in clone.modules():
                if isinstance(module, Block):
                    seen.append("compile()" if module._compiled_call_impl is not None else "plain")
                elif type(module).__name__ == "OptimizedModule":
                    seen.append("torch.compile")
        found = step(pipe, ours)
    assert len([kind for kind in seen if kind != "plain"]) == 4
    assert_close(found, expected, TOLERANCE[torch.float32])


def test_a_model_that_is_compiled_as_a_whole_is_warned_about() -> None:
    x, y = data(4)
    model, witness = chain(4), chain(4)
    with pytest.warns(UserWarning, match="pass compile=True"):
        pipe = wrapped(torch.compile(model, **QUICK), x, num_stages=2, n_microbatches=2)
    with pipe:
        loss = pipe.step(x, target=y)
    assert torch.allclose(loss, F.mse_loss(witness(x), y))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "inductor"}, "must be True, False or a dict"),
        ({"compile": {"backends": "eager"}}, "'backends', which is none of"),
        ({"compile": {"mode": "reduce-overhead"}}, "CUDA graphs"),
        ({"compile": {"options": {"triton.cudagraphs": True}}}, "CUDA graphs"),
        ({"compile": True, "recompute": "full"}, "recompute='full'"),
        ({"compile": True, "profile": True}, "profile=True"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    x, _ = data(4)
    with pytest.raises(FxChimeraError, match=words):
        wrapped(chain(2), x, num_stages=2, n_microbatches=2, **options)


def test_a_compiler_that_fails_is_named() -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    x, y = data(4)
    with (
        wrapped(chain(2), x, num_stages=2, n_microbatches=2, compile={"backend": failing}) as pipe,
        pytest.raises(fxchimera.PipelineError, match=r"(?s)stage \d .*no such kernel"),
    ):
        pipe.step(x, target=y)
