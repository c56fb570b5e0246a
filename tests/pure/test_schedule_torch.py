"""Our families against torch's own, action by action where both follow one rule, by their figures where the rules differ.

torch keeps these lists behind private names and wants a stage object; a mock stands in for it, and the tests are skipped where the
names have gone.  Tried on torch 2.13.
"""

from __future__ import annotations

import csv
import io
from unittest.mock import MagicMock

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Costs, certify, check, interleaved, lower, make_order, one_way, read_csv, v_shape
from fxchimera.schedule.interleaved import interleaved_one_f_one_b

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def written_by_torch(name, depth, number):
    """The compute-only CSV that torch writes for a schedule."""
    classes = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
    try:
        stage = MagicMock(num_stages=depth, group_size=depth, stage_index=0, group_rank=0)
        lists = getattr(schedules, classes[name])(stage, number)._get_pipeline_order()
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this torch has other private names: {error}")
    text = io.StringIO()
    csv.writer(text).writerows(lists[rank] for rank in range(depth))
    return text.getvalue()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("depth", "number"), [(2, 2), (3, 7), (4, 4), (4, 9), (8, 8)])
def test_same_lists_as_torch(name, depth, number):
    order = read_csv(written_by_torch(name, depth, number), one_way(depth, number), name)
    ours = make_order(name, depth, number)
    # torch 2.13 numbers the forwards of 1F1B's last rank from 1 instead of 0: there the kinds only are compared.
    assert order.ranks[:-1] == ours.ranks[:-1]
    assert [action.kind for action in order.ranks[-1]] == [action.kind for action in ours.ranks[-1]]
    if order == ours:
        check(lower(order))
    else:
        assert name == "1f1b"
        with pytest.raises(ScheduleError, match=f"{depth - 1}F{number} names a stage or micro-batch that is not there"):
            check(order)


def rows_by_torch(name, depth, number, chunks):
    """The compute-only CSV of one of torch's schedules with several stages a rank."""
    try:
        kind = getattr(schedules, name)
        rows = []
        for rank in range(depth):
            fake = MagicMock(
                pp_group_size=depth,
                n_local_stages=chunks,
                _n_microbatches=number,
                _num_stages=depth * chunks,
                num_stages=depth * chunks,
                rank=rank,
                microbatches_per_round=number // max(1, number // depth),
                number_of_rounds=max(1, number // depth),
                enable_zero_bubble=False,
            )
            rows.append(kind._calculate_single_rank_operations(fake, rank))
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this torch has other private names: {error}")
    text = io.StringIO()
    csv.writer(text).writerows([["" if action is None else str(action) for action in row] for row in rows])
    return text.getvalue()


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("depth", "number"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_interleaved_as_torch(depth, number, chunks):
    text = rows_by_torch("ScheduleInterleaved1F1B", depth, number, chunks)
    ours = interleaved_one_f_one_b(depth, number, chunks)
    assert read_csv(text, interleaved(depth, chunks, number), ours.name) == ours


@pytest.mark.parametrize(("depth", "number"), [(2, 4), (3, 7), (4, 8), (8, 16), (8, 33)])
def test_dualpipev_as_torch(depth, number):
    text = rows_by_torch("ScheduleDualPipeV", depth, number, 2)
    assert read_csv(text, v_shape(depth, number), "dualpipev") == make_order("dualpipev", depth, number)


@pytest.mark.parametrize(("depth", "number"), [(2, 4), (4, 8), (4, 9), (8, 16), (8, 32)])
def test_zbv_as_good_as_torch(depth, number):
    """Torch's ZBV is a fixed order, ours the paper's greedy rule: the same bubble and peak for N >= 2D, a smaller bubble below."""
    place, costs = v_shape(depth, number), Costs.uniform(2 * depth, 0.5, 1.0)
    torchs = read_csv(rows_by_torch("ScheduleZBVZeroBubble", depth, number, 2), place, "zbv of torch")
    check(lower(torchs))
    theirs, ours = certify(torchs, costs), certify(make_order("zbv", depth, number), costs)
    assert ours.makespan == pytest.approx(theirs.makespan)
    assert max(ours.peak_activations) == max(theirs.peak_activations)
