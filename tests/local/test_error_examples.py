"""Examples of tutorials/errors.md that no other test has: a user's mistakes with models and batches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fxchimera import BatchError, CaptureError, FxChimeraError, PartitionError, PipelineError
from fxchimera.runtime.checks import profile
from fxchimera.runtime.stages import program
from fxchimera.runtime.weights import saving
from fxchimera_passes import transfer
from fxchimera_passes.balance import cut, cuts
from fxchimera_passes.capture.entry import _Job, capture
from fxchimera_passes.cost import analytic
from fxchimera_passes.stages import make_plan
from tests.local.toys import Tanh, chain, data, seeded, wrapped

X, Y = data(8)


# ---------------------------------------------------------------------- the model


class Idle(nn.Module):
    """Has parameters, and does not use them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_that_uses_none_of_its_parameters() -> None:
    with pytest.raises(PartitionError, match=r"Idle.forward runs no operation on one of the model's 8 parameters"):
        wrapped(Idle(), X, num_stages=2, n_microbatches=2)


def test_no_stages() -> None:
    captured = capture(chain(2), (X,), {}, num_stages=1)
    with pytest.raises(PartitionError, match="num_stages must be at least 1, got 0"):
        make_plan(captured, analytic(captured), 0)


def test_costs_that_are_no_numbers() -> None:
    with pytest.raises(PartitionError, match=r"must be finite and not negative, got costs\[1\]=nan"):
        cut([1.0, math.nan], 2)


def test_more_parts_than_places_to_cut() -> None:
    with pytest.raises(PartitionError, match=r"at most 1 parts can be cut from 2 items \(1 places to cut\), 2 were asked for"):
        cuts([1.0, 1.0], 2, [0.1], crossing=[0.0, 0.0, 0.0], counts=[1, 0])


def test_a_model_whose_modules_never_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Job, "_attempt", lambda job, recorder: None)
    with pytest.raises(CaptureError, match=r"Sequential cannot be recorded: its modules have to be opened \(.*\) and closed"):
        wrapped(chain(2), X, num_stages=2, n_microbatches=2)


class Fickle(nn.Module):
    """Does less when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return x * self.weight if len(SEEN) > 1 else (x * self.weight).tanh()


SEEN: list[Tensor] = []


def test_recomputing_what_is_no_function_of_its_inputs() -> None:
    options: dict[str, Any] = {"num_stages": 1, "n_microbatches": 1, "recompute": "full", "schedule": "1f1b"}
    with wrapped(nn.Sequential(*chain(1), Fickle(), *chain(2)), X, **options) as pipe:
        SEEN.clear()
        with pytest.raises(PipelineError, match=r"the first time and \d+ the second: its forward is not a function of its inputs"):
            pipe.step(X, target=Y)


def test_writing_to_what_has_to_be_computed_again() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        SEEN[-1].detach().mul_(2)
        return F.mse_loss(output, target)

    options: dict[str, Any] = {"num_stages": 1, "n_microbatches": 1, "recompute": "full", "schedule": "1f1b"}
    with (
        wrapped(nn.Sequential(Fickle(), *chain(3)), X, loss_fn=loss_fn, **options) as pipe,
        pytest.raises(PipelineError, match=r"was written in place after it was read there"),
    ):
        pipe.step(X, target=Y)


def test_a_buffer_that_is_taken_away() -> None:
    model = seeded(lambda: nn.Sequential(*(nn.Sequential(Tanh(), nn.BatchNorm1d(6)) for _ in range(4))))
    with wrapped(model, X, num_stages=2, n_microbatches=2, schedule="1f1b") as pipe:
        model[1][1].running_mean = None
        with pytest.raises(FxChimeraError, match=r"buffer '1\.1\.running_mean' is gone since the model was wrapped"):
            pipe.step(X, target=Y)


# ---------------------------------------------------------------------- the batch


class Pair(nn.Module):
    """Takes two lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def forward(self, first: list[Tensor], second: list[Tensor]) -> Tensor:
        return self.layers(first[0] + second[0])


def test_one_container_for_two_arguments() -> None:
    both = [X]
    with pytest.raises(BatchError, match="the batch holds the same container twice"):
        wrapped(Pair(), both, both, num_stages=2, n_microbatches=2)


class Branching(nn.Module):
    """Goes another way where its parameters say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if bool(x.sum() > 0):
                x = x + 1
        return x


def test_measuring_a_branch_that_is_the_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PipelineError("rank 0 failed: planted")

    monkeypatch.setattr(profile, "measure", fail)
    with pytest.raises(PipelineError, match=r"planted \(the model branches on values that depend on .* profile=False\)"):
        wrapped(seeded(Branching), X, num_stages=2, n_microbatches=2, profile=True, schedule="1f1b")


def test_a_cut_that_another_recording_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    live: Any = SimpleNamespace(cuttable=[], nodes=[SimpleNamespace(name=name) for name in ("add", "mul", "out")])
    monkeypatch.setattr(transfer, "obstacle", lambda live, position: "planted")
    with pytest.raises(PartitionError, match=r"the cut before 'mul' cannot be kept in the other recording: planted\. Give"):
        transfer._between(live, 0, 1)


def test_caches_that_cannot_cross_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    first, right = [PartitionError("planted")], program.transfer

    def fail_once(*args: Any) -> Any:
        if first:
            raise first.pop()
        return right(*args)

    with wrapped(chain(4), X, num_stages=2, n_microbatches=2) as pipe:
        monkeypatch.setattr(program, "transfer", fail_once)
        with pytest.warns(UserWarning, match="key-value caches cannot cross the cuts and are left out of its output"):
            pipe.eval()(X)


# ---------------------------------------------------------------------- what is built around it


class Wordy(nn.Module):
    """Has words in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def get_extra_state(self) -> str:
        return "words"

    def set_extra_state(self, state: str) -> None:
        assert state == "words"

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_saving_words_in_a_models_state(tmp_path: Path) -> None:
    with (
        wrapped(Wordy(), X, num_stages=2, n_microbatches=2) as pipe,
        pytest.raises(FxChimeraError, match="state_dict has a str under '_extra_state'; only tensors can be saved"),
    ):
        pipe.save(tmp_path)


def test_loading_a_model_of_another_width(tmp_path: Path) -> None:
    with wrapped(chain(4), X, num_stages=2, n_microbatches=2) as pipe:
        pipe.save(tmp_path)
    wide, _ = data(8, 7)
    with (
        wrapped(chain(4, 7), wide, num_stages=2, n_microbatches=2) as pipe,
        pytest.raises(
            FxChimeraError, match=r"with the shape \(6,?.*\), but the model's is \(7,?.*\); build the model as it was saved"
        ),
    ):
        pipe.load(tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(6, 6)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"0.weight": "a.safetensors", "1.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    with pytest.raises(FxChimeraError, match=r"a\.safetensors does not hold '1\.weight', as its index says"):
        wrapped(model, X.float(), num_stages=2, n_microbatches=2, checkpoint=tmp_path)


def test_loading_when_a_file_is_gone(tmp_path: Path) -> None:
    with wrapped(chain(4), X, num_stages=2, n_microbatches=2) as pipe:
        pipe.save(tmp_path)
        gone = min(tmp_path.glob("*.safetensors"))
        gone.unlink()
        with pytest.raises(FxChimeraError, match=f"is damaged: {gone.name} cannot be read .*; use another checkpoint"):
            pipe.load(tmp_path)


def test_loading_what_the_files_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(chain(4), X, num_stages=2, n_microbatches=2) as pipe:
        pipe.save(tmp_path)
        monkeypatch.setattr(saving, "damaged", lambda files, saved, names: [])
        monkeypatch.setattr(saving, "files_of", lambda folder, stored: SimpleNamespace(read=lambda name: None, text=str(folder)))
        with pytest.raises(FxChimeraError, match=r"does not hold '0\.linear\.\w+', which the checkpoint's index lists"):
            pipe.load(tmp_path)


def test_loading_into_an_optimizer_of_more_parameters(tmp_path: Path) -> None:
    with wrapped(chain(4), X, num_stages=2, n_microbatches=2) as pipe:
        first, *others = pipe.parameters()
        pipe.save(tmp_path, optimizer=torch.optim.SGD(others, lr=0.1))
        with pytest.raises(FxChimeraError, match=r"which the optimizer has; it was saved with an optimizer of 7 parameters"):
            pipe.load(tmp_path, optimizer=torch.optim.SGD([first, *others], lr=0.1))


def test_saving_an_optimizer_that_keeps_objects(tmp_path: Path) -> None:
    with wrapped(chain(4), X, num_stages=2, n_microbatches=2) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        optimizer.param_groups[0]["owner"] = object()
        with pytest.raises(FxChimeraError, match=r"which is neither tensor, number, text nor a list of these"):
            pipe.save(tmp_path, optimizer=optimizer)


class Detour(nn.Module):
    """Goes through numpy, where nothing can be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * torch.from_numpy((x.detach().numpy() > 0).astype("float64"))


@pytest.mark.filterwarnings("ignore::fxchimera.CoarseCutWarning")
def test_parallelizing_a_model_that_is_one_call() -> None:
    def parallelize(stage_module: nn.Module, *, stage: int, device: torch.device) -> None:
        raise AssertionError("there is nothing to parallelize")

    with pytest.raises(FxChimeraError, match="Detour is recorded as one call, so it has no stages that could be parallelized"):
        wrapped(Detour(), X, num_stages=1, n_microbatches=2, parallelize=parallelize, schedule="1f1b")


def test_initialising_with_another_shape() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Tanh() for _ in range(4))).double()

    def larger(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.ones(2 * len(parameter), dtype=parameter.dtype)))

    with pytest.raises(FxChimeraError, match=r"was initialised with the shape \(12,\), but the model was recorded with \(6"):
        wrapped(model, X, num_stages=2, n_microbatches=2, param_init_fn=larger)
