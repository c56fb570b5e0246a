"""A ``Pipe`` that torch traced trains under our schedules as the model that it was traced from, tied parameters included."""

from __future__ import annotations

import pytest
import torch

import fxchimera
from fxchimera.errors import FxChimeraError, PartitionError
from fxchimera.interop import original_names
from tests.parity import TOLERANCE, Outcome, assert_close
from tests.pipes import N, batch, tagger, token_loss, traced

CELLS = [(4, 4, "chimera", True), (4, 2, "zbv", False), (2, 2, "auto", True)]  # stages, ranks, schedule, whether weights are tied
MORE = [(4, 4, "1f1b", True), (4, 4, "chimera", False), (4, 2, "zbv", True), (2, 2, "auto", False), (4, 2, "auto", True)]


@pytest.mark.parametrize(
    ("stages", "ranks", "schedule", "tied"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.matrix) for cell in MORE)]
)
def test_a_pipe_trains_as_the_model_it_was_traced_from(stages: int, ranks: int, schedule: str, tied: bool) -> None:
    twin = tagger(tied)
    tokens, mask = batch()
    with fxchimera.pipeline(
        traced(tagger(tied), stages), example_args=(tokens,), example_kwargs={"mask": mask}, loss_fn=token_loss, num_stages=ranks,
        n_microbatches=N, schedule=schedule,
    ) as pipe:  # fmt: skip
        assert len(pipe.plan.stages) == stages
        mine, theirs = torch.optim.SGD(pipe.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
        for _ in range(2):
            loss, expected = pipe.step(tokens, mask=mask, target=tokens), token_loss(twin(tokens, mask), tokens)
            expected.backward()
            found = original_names({name: parameter.grad for name, parameter in pipe.named_parameters()})
            wanted = {name: parameter.grad for name, parameter in twin.named_parameters()}
            assert_close(Outcome(loss, found), Outcome(expected.detach(), wanted), TOLERANCE[torch.float64])
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        fresh = tagger(tied)
        fresh.load_state_dict(original_names(pipe.state_dict()))
    torch.testing.assert_close(fresh.state_dict(), twin.state_dict())


def test_stages_of_a_pipe_may_be_joined() -> None:
    tokens, mask = batch()
    options = {"example_args": (tokens, mask), "loss_fn": token_loss, "n_microbatches": N, "num_stages": 2, "schedule": "1f1b"}
    with pytest.raises(PartitionError, match=r"the Pipe has 4 stages \(submod_pp_0, .*\), the schedule needs 2; pass another"):
        fxchimera.pipeline(traced(tagger(False), 4), **options)
    with fxchimera.pipeline(traced(tagger(False), 4), **options, split_points=["submod_pp_3"]) as pipe:
        loss = pipe.step(tokens, mask, target=tokens)
        twin = tagger(False)
        torch.testing.assert_close(loss, token_loss(twin(tokens, mask), tokens).detach())


def test_copies_of_a_tied_parameter_that_differ_are_refused() -> None:
    tokens, mask = batch()
    pipe = traced(tagger(True), 2)
    with torch.no_grad():
        pipe.get_stage_module(1).get_parameter("head.weight").add_(1.0)
    with pytest.raises(FxChimeraError, match=r"'submod_pp_0\.\w+\.weight' and 'submod_pp_1\.head\.weight' were one parameter"):
        fxchimera.pipeline(pipe, example_args=(tokens, mask), loss_fn=token_loss, num_stages=2, n_microbatches=N)
