"""What recomputation saves and costs, against the memory that is alive after real forwards, and all choices of modes."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fxchimera.planner.choose import Memory, choose_cut, sizes_of
from fxchimera.planner.draft import Auto, Draft, draft
from fxchimera.planner.pace import step_seconds
from fxchimera.planner.relief import Relief, reliefs
from fxchimera.planner.table import costs_of
from fxchimera.runtime.stages.again import again_for
from fxchimera.schedule import make_order
from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.keyed import microbatch_randomness
from fxchimera_passes.plan import MODES, Stage, StagePlan
from fxchimera_passes.recomputation import Recomputation
from fxchimera_passes.split import StageGraph, split
from fxchimera_passes.stages import make_plan
from fxchimera_passes.structure import flatten
from tests.models import MODELS, Example


class Alive(TorchDispatchMode):
    """Knows all memory that operators have made, and how much of it was alive at once, at most, since ``peak`` was set to 0."""

    def __init__(self, but: Iterable[Tensor]) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.there = {tensor.untyped_storage()._cdata for tensor in but}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, Tensor) else flatten(result)[0]:
            storage = tensor.untyped_storage()
            self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        self.made = {key: made for key, made in self.made.items() if key not in self.there and not made[0].expired()}
        return sum(size for _, size in self.made.values())


def gpt2(dropout: float) -> Example:
    """Wide enough that blocks, not the ends, are most of it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4, resid_pdrop=dropout, embd_pdrop=dropout,
                        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0)  # fmt: skip
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    return Example(GPT2LMHeadModel(config).train(), (), {"input_ids": ids, "labels": ids}, None, None)


def real_stages(example: Example, captured: Any, stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Run the stages on real tensors: by stage, the bytes alive between forward and backward, and the most in the backward."""
    inputs, _ = flatten((example.args, example.kwargs))
    there = [*example.model.parameters(), *example.model.buffers(), *inputs]
    received: tuple[Tensor, ...] = ()
    found = []
    plan = StagePlan(stages=tuple(stages), owner={}, bottleneck_seconds=0.0, bound_seconds=0.0)
    for graph in split(captured, plan):
        own = [*there, *flatten(list(graph.constants.values()))[0]]
        held, peak, sent = _run(graph, example.model, received, inputs, own)
        found.append((held, peak))
        received = tuple(
            value.contiguous().requires_grad_(boundary.meta.requires_grad)
            for value, boundary in zip(sent, graph.stage.sent, strict=False)
        )
    return found


def _run(
    graph: StageGraph, model: nn.Module, received: tuple[Tensor, ...], inputs: Sequence[Tensor], own: list[Tensor]
) -> tuple[int, int, list[Tensor]]:
    module = graph.bind(model, again=again_for(graph.stage.recompute))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with Alive([*own, *received, *gradients]) as alive, microbatch_randomness(1, 2, 3):
        sent = module(*received, *(inputs[i] for i in graph.stage.inputs))
    held = alive.bytes() + sum(value.untyped_storage().nbytes() for value in received)
    values = [value.detach().clone() for value in sent]
    roots = [value for value in sent if value.requires_grad]
    seeds = [torch.ones_like(root) for root in roots]
    sent, alive.peak = None, 0
    with alive:
        torch.autograd.backward(roots, seeds)
    peak = alive.peak + sum(value.untyped_storage().nbytes() for value in received)
    model.zero_grad()
    return held, peak, values


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gpt2_keeps_what_was_predicted(dropout: float) -> None:
    """To the byte: none > selective > full; the peak of a backward falls by what was predicted, to a twentieth."""
    example = gpt2(dropout)
    captured = capture(example.model, example.args, example.kwargs, num_stages=2)
    plan, again = make_plan(captured, analytic(captured), 2), Recomputation.of(captured)
    stages = {mode: [again.applied(stage, mode) for stage in plan.stages] for mode in MODES}
    real = {mode: real_stages(example, captured, stages[mode]) for mode in MODES}
    for number in range(2):
        held = {mode: real[mode][number][0] for mode in MODES}
        assert held == {mode: stages[mode][number].activation_bytes for mode in MODES}
        assert held["none"] > 2 * held["selective"] > 4 * held["full"]
        for mode in ("selective", "full"):
            stage = stages[mode][number]
            assert stage.recompute_bytes < held["none"]
            saved = held["none"] - held[mode] - stage.recompute_bytes
            assert real["none"][number][1] - real[mode][number][1] == pytest.approx(saved, abs=0.05 * real["none"][number][1])
            assert stage.recompute_seconds == pytest.approx(stage.backward_seconds - plan.stages[number].backward_seconds)
        assert 0 < stages["selective"][number].recompute_seconds < stages["full"][number].recompute_seconds
        assert stages["full"][number].recompute_seconds == pytest.approx(plan.stages[number].forward_seconds, rel=0.02)


@pytest.mark.parametrize(("name", "mode"), [("bert", "full"), ("resnet", "full"), ("masked_rotary", "selective")])
def test_stages_keep_what_was_predicted(name: str, mode: str) -> None:
    """As without recomputation: exact but where a stage copies what arrives, as it writes into it (resnet)."""
    example = MODELS[name](dropout=0.1)
    captured = capture(example.model, example.args, example.kwargs, num_stages=3)
    again = Recomputation.of(captured)
    stages = [again.applied(stage, mode) for stage in make_plan(captured, analytic(captured), 3).stages]
    found = [held for held, _ in real_stages(example, captured, stages)]
    assert [stage.activation_bytes for stage in stages] == pytest.approx(found, rel=0.1 if name == "resnet" else 0.001)


def planned(example: Example, ranks: int) -> tuple[Any, Any, Memory, StagePlan]:
    captured = capture(example.model, example.args, example.kwargs, num_stages=ranks)
    costs, order = analytic(captured), make_order("1f1b", ranks, 2 * ranks)
    memory = Memory.of(order, sizes_of(captured))
    return captured, costs, memory, choose_cut(captured, costs, order, (), memory)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_no_more_is_recomputed_than_the_cap_asks_for(share: float) -> None:
    """Against all modes of three stages: it fits, no stage can do with less, and it takes at most a third more than the best."""
    captured, costs, memory, cut = planned(gpt2(0.1), 3)
    plain = [need.total for need in memory.needed(cut.stages)]
    caps = tuple(int(share * max(plain)) for _ in plain)
    again = Recomputation.of(captured, costs)
    relief = Relief(again, None)
    found = relief.applied(cut, memory.needed, caps, memory.in_flight).stages

    def fits(stages: Sequence[Stage]) -> bool:
        return all(need.total <= cap for need, cap in zip(memory.needed(stages), caps, strict=True))

    every = [[again.applied(stage, mode) for stage, mode in zip(cut.stages, modes, strict=True)]
             for modes in itertools.product(MODES, repeat=3)]  # fmt: skip
    least = min(sum(stage.recompute_seconds for stage in stages) for stages in every if fits(stages))
    assert fits(found)
    assert sum(stage.recompute_seconds for stage in found) <= 1.34 * least
    for stage in found:
        for mode in MODES[: MODES.index(stage.recompute)]:
            assert not fits([*found[: stage.index], again.applied(cut.stages[stage.index], mode), *found[stage.index + 1 :]])


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.8), (2, 0.6), (3, 0.6)])
def test_it_is_chosen_where_holding_fewer_micro_batches_takes_longer(ranks: int, share: float) -> None:
    """With a part of the memory that a plan without a cap needs; beside no recomputation, and all of it."""
    example = gpt2(0.0)

    def plan(recompute: str, memory: int | None) -> Draft:
        wanted = Auto(ranks, 2 * ranks, lambda _: True)
        return draft(example.model, example.args, example.kwargs, wanted, memory=memory, recompute=recompute)

    cap = int(share * max(need.total for need in plan("none", None).plan.memory))
    found, *others = [plan(recompute, cap) for recompute in ("auto", "none", "full")]
    seconds, without, with_all = [step_seconds(made.order, made.plan.costs) for made in (found, *others)]
    assert all(need.total <= cap for need in found.plan.memory)
    assert seconds <= without
    assert seconds <= 1.01 * with_all
    assert any(stage.recompute != "none" for stage in found.cut.stages) == (seconds < without)


def test_halves_of_a_backward_know_of_it() -> None:
    """What runs again is run for the input gradient; the weight gradient takes as long as before."""
    captured, costs, memory, cut = planned(gpt2(0.0), 2)
    (relief,) = reliefs("full", captured, costs, capped=False)
    assert relief is not None
    plain, full = costs_of(cut.stages), costs_of(relief.applied(cut, memory.needed, (), memory.in_flight).stages)
    assert full.weight_grad == pytest.approx(plain.weight_grad)
    for more, forward in ((full.backward, plain.backward), (full.input_grad, plain.input_grad)):
        extra = [a - b for a, b in zip(more, forward, strict=True)]
        assert extra == pytest.approx([stage.forward_seconds for stage in cut.stages])


def test_one_mode_for_each_stage() -> None:
    captured, costs, memory, cut = planned(gpt2(0.0), 2)
    (relief,) = reliefs(("none", "selective"), captured, costs, capped=True)
    assert relief is not None
    stages = relief.applied(cut, memory.needed, (), memory.in_flight).stages
    assert [stage.recompute for stage in stages] == ["none", "selective"]
    assert stages[0] == cut.stages[0]
    with pytest.raises(PartitionError, match="2 modes for 1 stages"):
        relief.applied(replace(cut, stages=cut.stages[:1]), memory.needed, (), (1,))


def test_batch_norm_and_counters_are_kept_whole() -> None:
    """The stage says what it does not run again, and why; the rest is."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)])
    captured = capture(model, (torch.randn(6, 8),), {}, num_stages=2, opened=["0", "1", "2", "3"])
    again = Recomputation.of(captured)
    for stage in make_plan(captured, analytic(captured), 2).stages:
        full = again.applied(stage, "full")
        assert 0 < full.activation_bytes < stage.activation_bytes
        assert full.kept_whole
        assert all(".1 writes" in why and "num_batches_tracked" in why for why in full.kept_whole)
        repeated = {name for region in again.regions(stage, "full") for name in (again.live.nodes[i].name for i in region)}
        assert not any(name.endswith("_1") for name in repeated)
        assert repeated
