"""What torch's profiler sees of a step: the actions of the order under the names of torch.distributed.pipelining, each once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.local.toys import chain, data, wrapped


@pytest.mark.parametrize("schedule", ["chimera", "zbv", "zb-h1"])
def test_a_trace_holds_exactly_the_actions_of_the_order(schedule: str) -> None:
    x, y = data(8)
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with wrapped(chain(8), x, num_stages=4, n_microbatches=4, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as found:
            pipe.step(x, target=y)
        order = pipe._orders.step
    ranges = [event for event in found.events() if event.name.startswith("PP:")]
    expected = [Counter(f"PP:{action}" for action in rank) for rank in order.ranks]
    by_thread: dict[int, Counter[str]] = {}
    for event in ranges:
        by_thread.setdefault(event.thread, Counter())[event.name] += 1
    assert sorted(map(repr, map(sorted, by_thread.values()))) == sorted(map(repr, map(sorted, expected)))
    assert sum(by_thread.values(), Counter()) == sum(expected, Counter())
    forward = next(event for event in ranges if event.name == "PP:0F0")
    inside = [event.name for event in found.events() if event.thread == forward.thread and event.cpu_parent is forward]
    assert "aten::linear" in inside


def test_nothing_is_made_for_a_profiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    x, y = data(8)
    with wrapped(chain(8), x, num_stages=4, n_microbatches=4) as pipe:
        pipe.step(x, target=y)
