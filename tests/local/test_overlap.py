"""Nothing waits that need not: receives are posted ahead, the exchange keeps out of the computes' way, delays change no bit."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from fxchimera import Pipeline
from fxchimera.runtime.message import Key
from fxchimera.runtime.messages.local import LocalTransport
from fxchimera.runtime.transport import Channel
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import channel
from fxchimera.schedule.families import schedules
from fxchimera.schedule.timeline import Event
from tests.local.acting import around_actions
from tests.local.toys import chain, data, wrapped
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS
from tests.parity import assert_bitwise

FAMILIES = sorted(schedules())
MIRRORED = [name for name in FAMILIES if name.startswith(("chimera", "continuous")) or name == "dualpipe"]
BY_DEFAULT = ("chimera", "dualpipe", "zbv")


def some(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.matrix) for name in names]


def trained(schedule: str, ranks: int = 4, n: int = 8, layers: int = 8) -> tuple[Pipeline, tuple[Event, ...]]:
    """A pipeline after one step, closed, and the events of the step as they were measured."""
    x, y = data(2 * n)
    with wrapped(chain(layers), x, num_stages=ranks, n_microbatches=n, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        assert pipe._timeline is not None
        return pipe, pipe._timeline.events


def _mb(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize("schedule", FAMILIES)
def test_receives_are_posted_before_anything_is_computed_in_the_order_of_the_sends(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: dict[Channel, list[Key]] = {}
    computed: list[int] = []  # the rank of every compute so far
    began: dict[int, int] = {}  # by rank, how many it had done when it posted
    post = LocalTransport.post

    def note(rank: int, action: Action) -> None:
        if action.kind.is_compute:
            computed.append(rank)

    def noted_post(self: Any, expected: Any) -> None:
        for one in expected:
            posted.setdefault(one.channel, []).append(one.key)
            began[one.channel[1]] = computed.count(one.channel[1])
        post(self, expected)

    around_actions(monkeypatch, before=note)
    monkeypatch.setattr(LocalTransport, "post", noted_post)
    pipe, _ = trained(schedule)
    order = pipe._orders.step
    sent: dict[Channel, list[Key]] = {}
    for rank, action in order:
        if action.kind.is_send:
            sent.setdefault(channel(action, rank, order.placement), []).append(Key.of(action))
    assert posted == sent
    assert set(began.values()) == {0}


@pytest.mark.parametrize("schedule", MIRRORED)
def test_a_mirrors_gradients_leave_right_after_its_last_backward_and_are_added_after_all_computes(schedule: str) -> None:
    pipe, events = trained(schedule)
    place = pipe._orders.step.placement
    for rank in range(4):
        own = [event.action for event in events if event.rank == rank]
        computes = [action for action in own if action.kind.is_compute]
        sends = [action for action in own if action.kind is Kind.SEND_G]
        assert sends
        assert all(own.index(computes[-1]) < i for i, action in enumerate(own) if action.kind is Kind.RECV_G)
        for send in sends:
            mirror = next(number for number, stage in place.replicas(rank) if stage == send.stage)
            use = (mirror, send.stage)
            own_last = [a for a in computes if (place.pipe_of[_mb(a)], a.stage) == use and a.kind is not Kind.F][-1]
            between = own[own.index(own_last) + 1 : own.index(send)]
            assert not any(action.kind.is_compute for action in between)


@pytest.mark.parametrize("schedule", MIRRORED)
def test_a_mirror_waits_for_parameters_only_when_it_first_computes(schedule: str) -> None:
    pipe, events = trained(schedule)
    for rank, actions in enumerate(pipe._orders.step.ranks):
        own = [event for event in events if event.rank == rank]
        computes = [event.action for event in own if event.action.kind.is_compute]
        assert computes == [action for action in actions if action.kind.is_compute]
        for i, event in enumerate(own):
            if event.action.kind is Kind.RECV_P:
                following = next(later.action for later in own[i:] if later.action.kind.is_compute)
                assert (following.kind, following.stage) == (Kind.F, event.action.stage)


def test_parameters_that_come_late_do_not_delay_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gets the last stage's parameters only after its own first forward: to wait for them at the start would be for ever."""
    computed = threading.Event()
    send = LocalTransport.send

    def note(rank: int, action: Action) -> None:
        if rank == 0 and action.kind is Kind.F:
            computed.set()

    def late(self: Any, to: Any, *message: Any) -> None:
        if to == (3, 0, "P"):
            threading.Thread(target=lambda: (computed.wait(20.0), send(self, to, *message))).start()
        else:
            send(self, to, *message)

    around_actions(monkeypatch, after=note)
    monkeypatch.setattr(LocalTransport, "send", late)
    x, y = data(8)
    with wrapped(chain(4), x, num_stages=4, n_microbatches=4, schedule="chimera", wait_seconds=10.0) as pipe:
        pipe.step(x, target=y)
    assert computed.is_set()


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("schedule", some(FAMILIES))
@pytest.mark.parametrize("name", ["gpt2", pytest.param("tied", marks=pytest.mark.matrix)])
def test_delays_change_no_bit(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sleeps before each action: what ranks wait for changes, sums do not."""
    example = MODELS[name](batch=17, dropout=0.1)
    expected = reference(example, 4, 8, schedule)
    generators = [random.Random(rank) for rank in range(4)]
    around_actions(monkeypatch, before=lambda rank, _: time.sleep(generators[rank].choice([0.0, 0.0, 0.004])))
    with wrap(example, 4, 8, schedule) as pipe:
        assert_bitwise(step(pipe, example), expected)


@pytest.mark.parametrize("schedule", some(FAMILIES))
@pytest.mark.parametrize("name", ["gpt2", pytest.param("nn_transformer", marks=pytest.mark.matrix)])
def test_masks_are_those_of_one_stage(name: str, schedule: str) -> None:
    """D in {1, 2, 4}: every micro-batch has the masks, and so the loss bits, that it has in a pipeline of one stage."""
    losses = []
    for stages in (1, 2, 4) if schedule != "chimera-4" else (1, 4):  # two pairs of pipes need four ranks
        example = MODELS[name](batch=16, dropout=0.3)
        with wrap(example, stages, 8, schedule) as pipe:
            losses.append(step(pipe, example).loss)
    assert all(torch.equal(loss, losses[0]) for loss in losses[1:])
