"""``pipe.verify``: what is wrong is named with its stage, what is right raises no alarm, and nothing is left behind."""

from __future__ import annotations

import copy
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxchimera import FxChimeraError, Pipeline
from fxchimera.runtime.checks import verify
from tests.local import misled
from tests.local.untouched import untouched
from tests.local.wrapped import wrap
from tests.models import MODELS


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch norm, which sees micro-batches
        yield


@pytest.fixture(scope="module")
def sound() -> Iterator[Pipeline]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with misled.wrapped() as pipe:
            yield pipe


@pytest.mark.parametrize("kind", misled.WRONG)
def test_what_is_wrong_is_named(kind: str, sound: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline is the same in all cases, and has to be found right before each."""
    case = misled.WRONG[kind]
    x, mask, y = misled.batch()
    assert sound.verify(x, mask, target=y)
    case.plant(monkeypatch, sound)
    result = sound.verify(x, mask, target=y)
    found = {row.name for row in result.wrong}
    assert not result
    assert not result.ok
    assert result.first_bad_stage == case.stage, str(result)
    assert found >= set(case.wrong), str(result)
    assert found == set(case.wrong) or not case.alone, str(result)
    assert case.said in str(result)
    assert "DIFFERENT" in str(result).splitlines()[0]


QUICK = ("mlp", "resnet", "tied")
CELLS = [("chimera", name) if name in QUICK else pytest.param("chimera", name, marks=pytest.mark.matrix) for name in MODELS]


@pytest.mark.parametrize(("schedule", "name"), [*CELLS, *(pytest.param("zbv", name, marks=pytest.mark.matrix) for name in MODELS)])
def test_there_is_no_false_alarm(schedule: str, name: str) -> None:
    example = MODELS[name](batch=5, dropout=0.2)
    with wrap(example, 2, 3, schedule) as pipe:
        result = pipe.verify(*example.args, target=example.target, **example.kwargs)
    assert result.ok, str(result)
    assert result.bitwise or name == "resnet"  # whose running variances are rounded once more
    assert all(row.verdict == "bitwise" for row in result.rows if row.kind != "buffer")
    expected = {key for key, _ in example.model.named_parameters()}
    assert {row.name for row in result.of("parameter")} == expected
    assert {row.name for row in result.of("buffer")} >= {key for key, _ in example.model.named_buffers()}
    assert len(result.of("output")) == 3
    assert (result.first_bad_stage, result.fork, result.drifted) == (None, None, ())


def test_it_leaves_no_trace() -> None:
    """Gradients and their tensors, buffers, generators, modes, the optimizer, and what the next step does."""
    x, mask, y = misled.batch()
    losses = []
    for looks in (0, 2):
        with misled.wrapped() as pipe:
            model = pipe._model
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
            pipe.step(x, mask, target=y)
            optimizer.step()
            state, modes = copy.deepcopy(optimizer.state_dict()), [module.training for module in model.modules()]
            for _ in range(looks):
                with untouched(model):
                    assert pipe.verify(x, mask, target=y)
            assert [module.training for module in model.modules()] == modes
            torch.testing.assert_close(optimizer.state_dict(), state, rtol=0.0, atol=0.0)
            optimizer.zero_grad()
            losses.append((pipe.step(x, mask, target=y), pipe.state_dict()))
    (loss, wanted), (other, found) = losses
    assert torch.equal(loss, other)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)


def test_the_text_stays_short_and_the_table_has_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    example = MODELS["nn_transformer"](batch=6)
    with wrap(example, 2, 3) as pipe:
        fine = pipe.verify(*example.args, target=example.target, **example.kwargs)
        misled.gradient(lambda owned: [p.grad.mul_(1.5) for p in owned.values() if p.grad is not None])(monkeypatch, pipe)
        result = pipe.verify(*example.args, target=example.target, **example.kwargs)
    names = [key for key, _ in example.model.named_parameters()]
    assert len(names) > 40
    assert len(str(fine).splitlines()) == 2
    assert len(str(result).splitlines()) <= 13
    table = result.table()
    assert all(sum(f" {name} [" in line for line in table.splitlines()) == 1 for name in names)
    path = tmp_path / "rows.csv"
    text = result.to_csv(path)
    assert path.read_text() == text
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["name"] for row in rows if row["kind"] == "parameter"] == names
    by_name = {row["name"]: row for row in rows}
    for name, parameter in example.model.named_parameters():
        assert by_name[name]["shape"] == " ".join(map(str, parameter.shape))
        wrong = float(by_name[name]["norm"]) > 0
        assert by_name[name]["verdict"] == ("WRONG" if wrong else "bitwise")
        assert float(by_name[name]["relative"]) <= 0.5000001


def test_the_figures_are_those_of_the_plain_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    example = MODELS["mlp"](batch=4, dtype=torch.float64)
    example.loss(example.model(*example.args)).backward()
    plain = {name: p.grad.clone() for name, p in example.model.named_parameters() if p.grad is not None}
    example.model.zero_grad()
    with wrap(example, 2, 2) as pipe:
        misled.gradient(lambda owned: owned["30.weight"].grad.add_(1e-3))(monkeypatch, pipe)
        result = pipe.verify(*example.args, target=example.target)
    for row in result.of("parameter"):
        assert row.norm == pytest.approx(float(plain[row.name].norm()), rel=1e-12)
        changed = row.name == "30.weight"
        assert row.absolute == pytest.approx(1e-3 if changed else 0.0, rel=1e-9)
        expected = 1e-3 * plain[row.name].numel() ** 0.5 / row.norm if changed else 0.0
        assert row.relative == pytest.approx(expected, rel=1e-9)


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Nobody can see what this one leaves out."""
    each = torch.nn.functional.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (each * (target >= 0)).sum() / (target >= 0).sum()


@pytest.mark.parametrize(("weight", "remarked"), [("samples", True), (-100, False)])
def test_the_whole_batch_at_once_is_a_second_opinion_on_the_weights(weight: str | int, remarked: bool) -> None:
    """Rows whose labels do not count are not spread evenly, so a mean of means is another loss."""
    example = MODELS["mlp"](batch=5, dtype=torch.float64)._replace(loss_fn=masked)
    assert example.target is not None
    example.target[:2] = -100
    example.target[3] = -100
    wanted = float(example.loss(example.model(*example.args)).detach())
    with wrap(example, 2, 2, loss_weight=weight) as pipe:
        result = pipe.verify(*example.args, target=example.target)
    assert result.bitwise, "the rows take the weights as they are"
    assert result.whole_batch_loss == pytest.approx(wanted, rel=1e-12)
    assert ("remark: on the whole batch at once" in str(result)) == remarked
    assert (result.loss == pytest.approx(wanted, rel=1e-10)) != remarked


def test_a_plain_run_that_fails_is_an_error(sound: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the pipeline may be used further."""
    x, mask, y = misled.batch()

    def full(*args: object, **kwargs: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(verify, "run_plain", full)
    with pytest.raises(FxChimeraError, match="could not run the plain model beside the pipeline: MemoryError: planted"):
        sound.verify(x, mask, target=y)
    monkeypatch.undo()
    assert sound.verify(x, mask, target=y)


def test_compiled_stages_that_draw_are_refused() -> None:
    example = MODELS["mlp"](batch=6, dropout=0.1)
    with wrap(example, 2, 3, compile=True) as pipe, pytest.raises(FxChimeraError, match="compiled stages that draw at random"):
        pipe.verify(*example.args, target=example.target)


@pytest.mark.matrix
def test_compiled_stages_are_compared_where_they_draw_nothing() -> None:
    example = MODELS["mlp"](batch=6, dropout=0.1)
    with wrap(example, 2, 3, compile=True) as pipe:
        pipe.eval()
        result = pipe.verify(*example.args, target=example.target)
        assert result.ok, str(result)
        assert (result.fork, result.first_bad_stage) == (None, None)


def test_what_a_plain_run_cannot_tell_is_said() -> None:
    example = MODELS["resnet"](batch=6)
    with wrap(example, 2, 3, batch_norm="deferred") as pipe:
        result = pipe.verify(*example.args, target=example.target)
    assert result.bitwise
    assert 'not compared: 51 buffers that forward writes (batch_norm="deferred")' in str(result)
