"""Twenty public bug reports about pipelines, P01 to P20: which tests show each, and the tests of those that no other file has.

P01  send before receive on both ends          P11  integers and booleans cross a cut
P02  fewer micro-batches than stages           P12  floats without gradient cross a cut
P03  a batch that does not divide              P13  no stage is empty
P04  sequence lengths that change              P14  stages with nothing to train
P05  accumulation over several steps           P15  batch norm under micro-batching
P06  a mean over tokens                        P16  the result does not depend on the number of stages
P07  clipping by the global norm               P17  a batch size frozen into the graph
P08  an overflow on one rank only              P18  evaluate first, then train
P09  tied weights on different ranks           P19  models that return their loss
P10  one table read by every stage             P20  names of parameters
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.errors import BatchError, CaptureError, ScheduleError
from fxchimera.schedule import bidirectional, check, read_csv
from tests.local.toys import WIDTH, chain, data, plain, seeded, wrapped
from tests.parity import Outcome, assert_close, assert_same_tensors, gradients_of

ROOT = Path(__file__).parents[2]
CHIMERA_AND_1F1B = pytest.mark.parametrize("schedule", ["chimera", "1f1b"])

TESTS = {
    "P01": [
        "local/test_cases.py::test_p01_both_ranks_send_first", "pure/test_schedule_check.py::test_families_are_proven",
        "pure/test_schedule_oracle.py::test_mutants_are_refused_if_and_only_if_they_fail",
        "process/test_cases.py::test_p01_a_hundred_steps_with_two_stages_a_rank",
    ],
    "P02": ["local/test_api_cases.py::test_any_number_of_micro_batches"],
    "P03": ["local/test_api_loss.py::test_ragged_batches_are_weighted_by_rows"],
    "P04": ["local/test_api_cases.py::test_sequence_lengths_that_change"],
    "P05": ["local/test_api_cases.py::test_accumulation_is_a_sum"],
    "P06": ["local/test_api_loss.py::test_tokens_that_do_not_count"],
    "P07": ["local/test_api_cases.py::test_clipping_is_by_the_global_norm"],
    "P08": [
        "local/test_cases.py::test_p08_an_overflow_in_one_stage",
        "local/test_scaler.py::test_steps_are_skipped_and_scales_change_as_for_the_plain_model",
    ],
    "P09": ["local/test_api_cases.py::test_tied_weights_stay_tied"],
    "P10": ["local/test_api_cases.py::test_integers_booleans_constants_and_tables"],
    "P11": ["local/test_api_cases.py::test_integers_booleans_constants_and_tables"],
    "P12": ["local/test_api_cases.py::test_integers_booleans_constants_and_tables"],
    "P13": [
        "pure/test_balance.py::test_no_part_is_empty", "pure/test_balance.py::test_every_cut_is_optimal",
        "graph/test_plan.py::test_every_stage_has_work", "graph/test_plan.py::test_too_few_parameters_names_both_numbers",
    ],
    "P14": ["local/test_api_cases.py::test_stages_with_nothing_to_train"],
    "P15": [
        "local/test_api_statistics.py::test_batch_norm_statistics_equal_the_plain_loops",
        "local/test_batchnorm.py::test_deferred_statistics_are_the_whole_batchs",
        "local/test_batchnorm.py::test_one_warning_names_the_layers",
    ],
    "P16": [
        "local/test_cases.py::test_p16_dropout_does_not_depend_on_the_number_of_stages",
        "local/test_cases.py::test_p16_nor_does_a_step_on_the_number_of_micro_batches",
        "local/test_cases.py::test_p16_a_batch_that_is_not_the_first_dimension_is_named",
    ],
    "P17": [
        "local/test_api_cases.py::test_a_batch_size_read_in_the_forward",
        "local/test_cases.py::test_p17_a_literal_batch_size_is_refused_with_its_line",
    ],
    "P18": ["local/test_api_statistics.py::test_evaluation_anywhere_changes_nothing"],
    "P19": ["local/test_api_loss.py::test_the_models_own_loss_in_every_form"],
    "P20": [
        "local/test_api_outputs.py::test_names_are_the_models_own",
        "local/test_cases.py::test_p20_the_optimizers_state_follows_the_names",
    ],
}  # fmt: skip


def test_every_case_has_its_tests() -> None:
    assert list(TESTS) == [f"P{number:02}" for number in range(1, 21)]
    for places in TESTS.values():
        for place in places:
            path, name = place.split("::")
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE), place


def test_p01_both_ranks_send_first() -> None:
    """Each rank's send waits for the other's receive, which comes after its own send: refused; the other way round it is proven."""
    place = bidirectional(2, 2)
    text = "0F0,0SEND_F0,1RECV_F1,1F1,1B1,1SEND_B1,0RECV_B0,0B0\n0F1,{},1F0,0RECV_B1,1B0,1SEND_B0,0B1\n"
    check(read_csv(text.format("1RECV_F0,0SEND_F1"), place))
    with pytest.raises(ScheduleError, match=r"(?s)0SEND_F0.*0SEND_F1|0SEND_F1.*0SEND_F0"):
        check(read_csv(text.format("0SEND_F1,1RECV_F0"), place))


def test_p08_an_overflow_in_one_stage() -> None:
    """Step 3 has infinite gradients in one stage: it is skipped everywhere, the scale halves, step 4 goes on."""
    model, bad = chain(4), [False]
    model[1].linear.weight.register_hook(lambda gradient: gradient * float("inf") if bad[0] else gradient)
    x, y = data(8)
    with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        scaler, scales, kept = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=100), [], []
        for step in range(1, 5):
            bad[0] = step == 3
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            pipe.step(x, target=y, loss_scale=scaler.scale(torch.ones(())))
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            kept.append(all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()))
    assert scales == [16.0, 16.0, 8.0, 8.0]
    assert kept == [False, False, True, False]


def test_p16_dropout_does_not_depend_on_the_number_of_stages() -> None:
    """Dropout 0.1, six layers: the same loss and gradients to the last bit at 1, 2 and 4 stages, and in a second run."""
    x, y = data(8)
    found = []
    for stages in (1, 2, 4, 4):
        model = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(6))))
        with wrapped(model, x, num_stages=stages, n_microbatches=4, schedule="1f1b", seed=5) as pipe:
            found.append(Outcome(pipe.step(x, target=y), gradients_of(model)))
    for other in found[1:]:
        assert torch.equal(other.loss, found[0].loss)
        assert_same_tensors(other.gradients, found[0].gradients)


@CHIMERA_AND_1F1B
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_p16_nor_does_a_step_on_the_number_of_micro_batches(n: int, schedule: str) -> None:
    x, y = data(8)
    expected, model = plain(chain(6), lambda m: F.mse_loss(m(x), y)), chain(6)
    with wrapped(model, x, num_stages=2, n_microbatches=n, schedule=schedule) as pipe:
        assert_close(Outcome(pipe.step(x, target=y), gradients_of(model)), expected, 1e-12)


class TimeFirst(nn.Module):
    """Takes [batch, time, width] and returns [time, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))).transpose(0, 1)
        return y


@pytest.mark.parametrize(
    ("time", "message"),
    [
        (3, r"output tensor 0 .* cannot be merged: shapes \[\(3, 2, 6\), \(3, 2, 6\)\] for \[2, 2\] rows"),
        (2, r"output tensor 0 has shape \(2, 2, 6\) for 2 rows, but its batch is dimension 1: with one row more .* \(2, 3, 6\)"),
    ],
)
def test_p16_a_batch_that_is_not_the_first_dimension_is_named(time: int, message: str) -> None:
    """Also where the other dimension is as long as a micro-batch: merged outputs would have mixed rows."""
    x = data(4, time, WIDTH)[0]
    with wrapped(seeded(TimeFirst), x, loss_fn=Tensor.mean, num_stages=2, n_microbatches=2) as pipe:
        pipe.step(x)
        for _ in range(2):
            with pytest.raises(BatchError, match=message):
                pipe(x)
        pipe.step(x)


def test_p16_outputs_that_are_square_by_chance_are_merged() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))), data(4)[0]
    with wrapped(model, x, num_stages=2, n_microbatches=2) as pipe:
        torch.testing.assert_close(pipe(x), model(x).detach())


class Literal(nn.Module):
    """Reshapes to two rows, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).view(2, WIDTH)
        y: Tensor = self.second(hidden)
        return y


def test_p17_a_literal_batch_size_is_refused_with_its_line() -> None:
    lines, first = inspect.getsourcelines(Literal.forward)
    line = first + next(number for number, text in enumerate(lines) if ".view(" in text)
    x, y = data(4)
    with wrapped(seeded(Literal), x, num_stages=2, n_microbatches=2) as pipe:
        pieces = [seeded(Literal)(piece).detach() for piece in x.split(2)]
        torch.testing.assert_close(pipe.step(x, target=y), F.mse_loss(torch.cat(pieces), y))
        for rows in (6, 10):
            x, y = data(rows)
            with pytest.raises(CaptureError, match=rf"test_cases\.py:{line}.*shape '\[2, 6\]' is invalid"):
                pipe.step(x, target=y)
    with pytest.raises(CaptureError, match=rf"test_cases\.py:{line}"):
        wrapped(seeded(Literal), data(6)[0], num_stages=2, n_microbatches=2)


def test_p20_the_optimizers_state_follows_the_names() -> None:
    """Saved by name after two steps at 4 stages, loaded at 2: the third step is the plain model's."""
    x, y = data(8)
    twin, model = chain(4), chain(4)
    expected = torch.optim.AdamW(twin.parameters(), lr=0.05)
    saved: dict[str, dict[str, Tensor]] = {}
    for stages, steps in ((4, 2), (2, 1)):
        with wrapped(model, x, num_stages=stages, n_microbatches=4) as pipe:
            named = dict(pipe.named_parameters())
            optimizer = torch.optim.AdamW(named.values(), lr=0.05)
            if saved:
                optimizer.state.update({named[name]: state for name, state in saved.items()})
            for _ in range(steps):
                optimizer.zero_grad()
                expected.zero_grad()
                pipe.step(x, target=y)
                plain(twin, lambda m: F.mse_loss(m(x), y))
                optimizer.step()
                expected.step()
            saved = {name: dict(optimizer.state[parameter]) for name, parameter in named.items()}
            state = pipe.state_dict()
        model = chain(4)
        model.load_state_dict(state)
    torch.testing.assert_close(state, dict(twin.state_dict()), rtol=1e-9, atol=1e-12)
