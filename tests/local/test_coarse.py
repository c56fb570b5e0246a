"""Models with too few pieces for the stages asked for run right, and say so loudly."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxchimera
from fxchimera import CaptureError, CoarseCutWarning, FxChimeraError
from tests import coarse
from tests.local.toys import WIDTH, data, seeded, wrapped
from tests.local.wrapped import reference, step, wrap
from tests.parity import assert_bitwise, assert_close, assert_same_tensors, gradients_of, micro_batch_loop

CELLS = [(kind, n, schedule) for kind in coarse.KINDS for n, schedule in ((1, "1f1b"), (2, "chimera"), (5, "chimera"))]


@pytest.fixture
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("kind", "n", "schedule"), CELLS)
def test_steps_equal_the_plain_model(kind: str, n: int, schedule: str) -> None:
    """Two witnesses: the plain loop over micro-batches, and with dropout the reference to the last bit; then another batch size."""
    example, plain = coarse.build(kind), coarse.build(kind)
    with wrap(example, 4, n, schedule) as pipe:
        assert all(stage.owned for stage in pipe.plan.stages)
        assert len(list(torch.optim.AdamW(pipe.parameters()).param_groups[0]["params"])) == len(list(plain.model.parameters()))
        assert_close(step(pipe, example), micro_batch_loop(plain, n), 1e-12)
        for (name, found), (_, expected) in zip(example.model.named_buffers(), plain.model.named_buffers(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0, msg=name)
        assert_same_tensors(pipe.state_dict(), example.model.state_dict())
    dropped = coarse.build(kind, dropout=0.3)
    twin = dropped._replace(model=copy.deepcopy(dropped.model))
    with wrap(dropped, 4, n, schedule) as pipe:
        assert_bitwise(step(pipe, dropped), reference(twin, 4, n, schedule))
        dropped.model.zero_grad()
        assert_bitwise(step(pipe, coarse.rebatch(dropped, 11)), reference(coarse.rebatch(twin, 11), 4, n, schedule, step=1))
        pipe.eval()
        dropped.model.zero_grad()
        plain.model.load_state_dict(dropped.model.state_dict())
        plain.model.eval()
        torch.testing.assert_close(pipe(*plain.args), plain.model(*plain.args), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "pieces", "idle", "texts"),
    [
        ("numpy", "1 piece", 2, ["forward of Numpy itself", "numpy() reads", "coarse.py:", "num_stages=1", "submodule"]),
        ("inner", "1 piece", 2, ["coarse.py:", "num_stages=1"]),
    ],
)
def test_the_warning_tells_what_why_and_what_to_do(kind: str, pieces: str, idle: int, texts: list[str]) -> None:
    with pytest.warns(CoarseCutWarning) as caught, wrap(coarse.build(kind), 4, 2) as pipe:
        assert [bool(stage.nodes) for stage in pipe.plan.stages] == [False, False, False, True]
    (warning,) = (w for w in caught if w.category is CoarseCutWarning)
    text = str(warning.message)
    for part in [*texts, pieces, "4 stages were asked for", f"{idle} of 4 ranks compute nothing", "filterwarnings"]:
        assert part in text, text


@pytest.mark.parametrize("kind", ["bare", "recurrent"])
def test_lending_is_not_warned_about(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CoarseCutWarning)
        with wrap(coarse.build(kind), 4, 2) as pipe:
            assert all(stage.nodes and stage.owned for stage in pipe.plan.stages)


def test_a_filter_makes_the_warning_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=fxchimera.CoarseCutWarning)
        with pytest.raises(CoarseCutWarning, match="Numpy"):
            wrap(coarse.build("numpy"), 4, 2)


def test_more_stages_than_layers_train_as_the_plain_model() -> None:
    x, y = data(6)
    model, plain = (seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))) for _ in range(2))
    with pytest.warns(CoarseCutWarning, match="cut into 3 pieces.*num_stages=3 or fewer.*0 of 4 ranks"):
        pipe = wrapped(model, x, num_stages=4, n_microbatches=2)
    with pipe:
        loss = pipe.step(x, target=y)
    F.mse_loss(plain(x), y).backward()
    assert float(loss) == pytest.approx(float(F.mse_loss(plain(x), y)), rel=1e-12)
    for name, wanted in gradients_of(plain).items():
        torch.testing.assert_close(gradients_of(model)[name], wanted, rtol=1e-10, atol=1e-14, msg=name)


def test_a_batch_of_the_wrong_width_stays_an_error() -> None:
    x, _ = data(6)
    with pytest.raises(CaptureError, match=r"fails at .* on this batch, also when it is run as it is: RuntimeError.*shapes"):
        wrapped(coarse.build("numpy").model, x[:, :4], num_stages=4, n_microbatches=2)


class Counting(nn.Module):
    """Counts its calls and reads a value with numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.layer(x)
        return x * float(x.detach().numpy().max()) * self.calls


@pytest.mark.filterwarnings("ignore:Counting was run on real tensors")
def test_state_in_the_model_is_kept_by_one_copy_and_refused_for_two() -> None:
    x, y = data(6)
    model, plain = seeded(Counting), seeded(Counting)
    with pytest.warns(CoarseCutWarning), pytest.raises(FxChimeraError, match=r"'calls'.*two copies"):
        wrapped(model, x, num_stages=2, n_microbatches=2)
    assert model.calls == 0
    with pytest.warns(CoarseCutWarning, match="what it sets, calls, is set on a copy"):
        pipe = wrapped(model, x, num_stages=2, n_microbatches=1, schedule="1f1b")
    with pipe:
        for _ in range(3):
            assert torch.equal(pipe.step(x, target=y), F.mse_loss(plain(x), y).detach())


@pytest.mark.usefixtures("_quiet")
def test_hooks_of_a_model_that_is_one_call_run() -> None:
    x, y = data(6)
    model = coarse.build("numpy").model
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(output)) or 2 * output)
    with wrapped(model, x, num_stages=4, n_microbatches=2) as pipe:
        seen.clear()
        loss = pipe.step(x, target=y)
    assert seen == [3, 3]
    plain = coarse.build("numpy").model
    expected = sum(F.mse_loss(2 * plain(part), target) / 2 for part, target in zip(x.split(3), y.split(3), strict=True))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0.0)
