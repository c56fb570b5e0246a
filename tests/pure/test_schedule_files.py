"""Orders as torch's files: what is written is what torch's own loader reads, and what torch dumps is read as our order."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from fxchimera.errors import ScheduleError
from fxchimera.schedule import check, lower, make_order, read_csv_file, schedules, write_csv_file

theirs = pytest.importorskip("torch.distributed.pipelining.schedules")

ONE_WAY = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half", "dualpipev"]
CELLS = [(2, 4), (3, 7), (4, 8)]


def loader(order):
    """Torch's runtime without ranks: its lists, its checks and its lowering."""
    kind = getattr(theirs, "_PipelineScheduleRuntime", None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no _PipelineScheduleRuntime")
    place = order.placement
    stage = MagicMock(num_stages=place.num_stages, group_size=place.num_ranks, group_rank=0, stage_index=0)
    return kind([stage], place.n_microbatches)


@pytest.mark.parametrize("name", ONE_WAY)
@pytest.mark.parametrize(("depth", "number"), CELLS)
def test_torch_loads_what_is_written(name, depth, number, tmp_path):
    order = make_order(name, depth, number)
    write_csv_file(order, path := tmp_path / "order.csv")
    runtime = loader(order)
    runtime._load_csv(str(path), format="compute_only")
    assert [[str(action) for action in runtime.pipeline_order[rank]] for rank in range(depth)] == [
        [str(action) for action in actions] for actions in order.ranks
    ]
    where = dict(enumerate(order.placement.pipes[0]))
    assert runtime.stage_index_to_group_rank == where


@pytest.mark.parametrize("name", ONE_WAY)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_dumps_is_our_order(name, form, tmp_path):
    order = make_order(name, 4, 8)
    write_csv_file(order, path := tmp_path / "order.csv")
    runtime = loader(order)
    runtime._load_csv(str(path), format="compute_only")
    runtime._dump_csv(str(path), format=form)
    found = read_csv_file(path)
    assert (found.placement, found.ranks) == (order.placement, order.ranks)
    check(lower(found))


@pytest.mark.parametrize("name", sorted(set(schedules()) - set(ONE_WAY)))
def test_two_copies_of_a_stage_cannot_be_written(name, tmp_path):
    with pytest.raises(ScheduleError, match=r"pipes, and torch\.distributed\.pipelining has one copy of each stage"):
        write_csv_file(make_order(name, 4, 8), tmp_path / "order.csv")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("torchs", "ours"), [("GPipe", "gpipe"), ("1F1B", "1f1b"), ("Interleaved1F1B", "interleaved-1f1b"), ("ZBVZeroBubble", "zbv")]
)
def test_torchs_names_are_known(torchs, ours):
    assert theirs.get_schedule_class(torchs) is not None
    assert make_order(torchs, 2, 4) == make_order(ours, 2, 4)
