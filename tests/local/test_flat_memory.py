"""What a step holds: no more micro-batches than the proof says, no activation past its last reader, nothing afterwards."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fxchimera import Pipeline
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.check import check
from fxchimera.schedule.families import schedules
from fxchimera_passes._torch import FakeTensor
from tests.local.acting import around_actions
from tests.local.toys import chain, data, wrapped

RANKS, MICROBATCHES = 4, 8
MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def watched_stages() -> None:
    """The watch that other tests are under keeps a table that grows and shrinks."""


class Watch:
    """Follows every rank's actions: micro-batches in flight, and the memory of what its modules returned."""

    def __init__(self, model: nn.Module, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = dict.fromkeys(range(RANKS), 0)  # micro-batches in flight, by rank
        self.held = dict.fromkeys(range(RANKS), 0)  # whose activations are alive, by rank
        self.left: list[str] = []  # actions after which activations were alive that nobody needs
        self._replicas = {one.rank: list(one.replicas.values()) for one in pipe._engine.executors}
        self._present = threading.local()
        self._memory: dict[tuple[int, int, int | None], list[StorageWeakRef]] = {}  # by rank, stage and micro-batch
        for module in model.modules():
            module.register_forward_hook(self._note)
        around_actions(monkeypatch, before=self._begin, after=self._end)

    def _begin(self, rank: int, action: Action) -> None:
        self._present.place = (rank, action.stage, action.microbatch)

    def _note(self, _module: nn.Module, _args: object, output: torch.Tensor) -> None:
        place = getattr(self._present, "place", None)
        if place is not None:  # while the model is recorded there is none
            self._memory.setdefault(place, []).append(StorageWeakRef(output.untyped_storage()))

    def _end(self, rank: int, action: Action) -> None:
        self.most[rank] = max(self.most[rank], sum(replica.in_flight for replica in self._replicas[rank]))
        if not action.kind.is_compute:
            return
        memory = {place: refs for place, refs in list(self._memory.items()) if place[0] == rank}
        alive = {place for place, refs in memory.items() if not all(ref.expired() for ref in refs)}
        self.held[rank] = max(self.held[rank], len(alive))
        if action.kind in (Kind.B, Kind.W) and (rank, action.stage, action.microbatch) in alive:
            self.left.append(f"rank {rank}: {action}")


@pytest.mark.parametrize("schedule", [*sorted(schedules()), "auto"])
def test_no_rank_holds_more_than_the_proof_says_and_nothing_outlives_its_backward(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof's peak is reached, too, so it is no bound out of reach."""
    model, (x, y) = chain(8), data(2 * MICROBATCHES)
    with wrapped(model, x, num_stages=RANKS, n_microbatches=MICROBATCHES, schedule=schedule) as pipe:
        peaks = check(pipe._orders.step).peak_activations
        watch = Watch(model, pipe, monkeypatch)
        for _ in range(2):
            pipe.step(x, target=y)
            assert tuple(watch.most.values()) == peaks
            assert all(watch.held[rank] <= peaks[rank] for rank in range(RANKS))
            assert watch.left == []
        replicas = [replica for one in pipe._engine.executors for replica in one.replicas.values()]
        assert all(replica.in_flight == 0 for replica in replicas)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live() -> tuple[int, int]:
    """Tensors that Python can reach, and the bytes of their memory."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor)]
    dense = [thing for thing in found if thing.layout == torch.strided]
    sizes = {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes() for thing in dense}
    return len(found), sum(sizes.values())


def training(pipe: Pipeline, *batch: torch.Tensor) -> Callable[[int], None]:
    """Steps of the pipeline and of an optimizer."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            pipe.step(batch[0], target=batch[1])
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize("schedule", ["chimera", pytest.param("zbv", marks=pytest.mark.matrix)])
def test_a_hundred_steps_leave_no_object(schedule: str) -> None:
    """Tensors to the last one; of other objects, plain torch leaves some 200 bytes a step too."""
    x, y = data(8)
    with wrapped(chain(4), x, num_stages=2, n_microbatches=4, schedule=schedule) as pipe:
        train = training(pipe, x, y)
        train(1)
        tracemalloc.start()
        try:
            train(150)  # free lists of the interpreter fill up
            before, python = live(), tracemalloc.get_traced_memory()[0]
            train(100)
            assert live() == before
            assert tracemalloc.get_traced_memory()[0] - python < 50_000
        finally:
            tracemalloc.stop()


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", sorted(schedules()))
def test_five_hundred_steps_leave_the_process_as_large_as_it_was(schedule: str) -> None:
    x, y = data(2 * MICROBATCHES, 64)
    with wrapped(chain(8, width=64), x, num_stages=RANKS, n_microbatches=MICROBATCHES, schedule=schedule) as pipe:
        train = training(pipe, x, y)
        train(50)
        before = resident()
        train(500)
        assert resident() - before < 5 * MEGABYTE
