"""Our one-way families against torch's own, action by action.

torch keeps these lists behind private names and wants a stage object; a mock stands in for it, and the tests are skipped where the
names have gone.  Tried on torch 2.13.
"""

from __future__ import annotations

import csv
import io
from unittest.mock import MagicMock

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.schedule import check, lower, make_order, one_way, read_csv

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
