"""The checker accepts every family and refuses every planted fault, naming the actions."""

from __future__ import annotations

import time

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.schedule import (
    Action,
    Order,
    Placement,
    SyncEdge,
    channel,
    check,
    forward_only,
    lower,
    make_order,
    one_way,
    peer,
    read_csv,
)


def mirrors(order):
    """The natural exchange: the up replica of stage s, on rank D-1-s, is the mirror of the down replica on rank s."""
    place = order.placement
    if len(place.pipes) == 1:
        return ()
    return tuple(SyncEdge(stage, place.pipes[1][stage], place.pipes[0][stage]) for stage in range(place.num_stages))


@pytest.mark.parametrize(
    ("schedule", "depth"),
    [(schedule, depth) for schedule in ("gpipe", "1f1b", "chimera") for depth in (1, 2, 4, 6, 8)] + [("gpipe", 5), ("1f1b", 3)],
)
def test_families_are_proven(schedule, depth):
    for number in range(1, 18):
        order = make_order(schedule, depth, number)
        sync = mirrors(order)
        lowered = lower(order, sync=sync)
        proof = check(lowered, sync=sync)
        assert proof.messages == 2 * number * (depth - 1) + 2 * len(sync)
        assert proof.digest == lowered.digest()
        assert proof.channels == tuple(sorted(proof.channels))
        assert len(proof.early) == len(proof.channels)
        assert check(lowered, slots=proof.peak_activations) == proof
        evaluation = lower(forward_only(order), sync=sync)
        assert check(evaluation, sync=sync).messages == number * (depth - 1) + len(sync)
        assert not any(action.kind.value in ("SEND_G", "RECV_B") for rank in evaluation.ranks for action in rank)


def test_channels_of_chimera():
    """Between two neighbours four flows, two each way; between a mirror and its owner two (D=2, N=2)."""
    order = make_order("chimera", 2, 2)
    proof = check(lower(order, sync=mirrors(order)))
    assert proof.channels == (
        (0, 1, "G"),
        (0, 1, "P"),
        (0, 1, "down-F"),
        (0, 1, "up-B"),
        (1, 0, "G"),
        (1, 0, "P"),
        (1, 0, "down-B"),
        (1, 0, "up-F"),
    )
    assert proof.early == (1,) * 8
    assert proof.peak_activations == (2, 2)


@pytest.mark.parametrize(
    ("text", "rank", "other", "flow"),
    [
        ("0SEND_F0", 0, 1, (0, 1, "down-F")),
        ("1RECV_F0", 1, 0, (0, 1, "down-F")),
        ("2SEND_B1", 2, 1, (2, 1, "down-B")),
        ("0SEND_F2", 3, 2, (3, 2, "up-F")),
        ("0RECV_B2", 3, 2, (2, 3, "up-B")),
        ("3SEND_G>3", 0, 3, (0, 3, "G")),
        ("3RECV_P<3", 0, 3, (3, 0, "P")),
    ],
)
def test_channel(text, rank, other, flow):
    place = make_order("chimera", 4, 4).placement
    assert peer(Action.parse(text), rank, place) == other
    assert channel(Action.parse(text), rank, place) == flow


@pytest.mark.parametrize("text", ["3SEND_F0", "0SEND_B0", "0RECV_F0", "3RECV_B0", "1SEND_F9", "1F0", "1SEND_G>4"])
def test_no_other_end(text):
    with pytest.raises(ScheduleError, match=text):
        peer(Action.parse(text), 0, one_way(4, 4))


def test_early_messages_are_tight():
    """GPipe's sender can be all its forwards ahead; in 1F1B with D=2 the third forward waits for the first backward, and so on."""
    assert check(lower(make_order("gpipe", 2, 3))).early == (3, 3)
    proof = check(lower(make_order("1f1b", 2, 6)))
    assert dict(zip(proof.channels, proof.early, strict=True)) == {(0, 1, "down-F"): 2, (1, 0, "down-B"): 2}


ORDER = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1
"""
FAULTS = {
    "swapped receives": (
        "1RECV_F0,1F0,1RECV_F1,1B0",
        "1RECV_F1,1RECV_F0,1F0,1B0",
        r"channel down-F from rank 0 to rank 1: message 0 is 0SEND_F0 on rank 0 .* but 1RECV_F1 on rank 1 .*1RECV_F0 belongs there",
    ),
    "facing sends": (
        "1RECV_F1,1B0,1SEND_B0,1F1",
        "1B0,1SEND_B0,1RECV_F1,1F1",
        r"deadlocks when messages block: rank 0 stands at 0SEND_F1 until rank 1 reaches 1RECV_F1 \(position 4\), but .* 1SEND_B0 .*"
        r"rank 1 stands at 1SEND_B0 until rank 0 reaches 0RECV_B0 \(position 4\), but rank 0 stands at 0SEND_F1",
    ),
    "a send nobody receives": (",1RECV_F1", "", "rank 0 sends 0SEND_F1, and rank 1 never receives it: 1RECV_F1 is missing"),
    "a receive nobody sends": (",1SEND_B1", "", "rank 0 receives 0RECV_B1, and rank 1 never sends it: 1SEND_B1 is missing"),
    "a missing backward": (",0B1", "", "rank 0 runs 0F1 and must run 0B1, or 0I1 and 0W1; it runs none of them"),
    "a missing half": ("0B1", "0I1", "rank 0 runs 0F1 and must run 0B1, or 0I1 and 0W1; it runs 0I1"),
    "both backwards": ("0B1", "0B1,0I1,0W1", "must run 0B1, or 0I1 and 0W1; it runs 0B1 and 0I1 and 0W1"),
    "halves in the wrong order": ("0B1", "0W1,0I1", r"rank 0 runs 0W1 \(position 7\) before 0I1, which comes later \(position 8\)"),
    "a missing forward": ("1F1,", "", "rank 1 runs 1B1 but never runs 1F1"),
    "a duplicate forward": ("1F1,", "1F1,1F1,", "1F1 is there twice on rank 1, at positions 5 and 6"),
    "a duplicate send": ("0SEND_F1", "0SEND_F1,0SEND_F1", "0SEND_F1 is there twice"),
    "a forward on the wrong rank": ("0F1", "1F1", "1F1 is on rank 0, but stage 1 of micro-batch 1, which goes down, is on rank 1"),
    "a send before its computation": (
        "0F1,0SEND_F1",
        "0SEND_F1,0F1",
        r"rank 0 runs 0SEND_F1 \(position 2\) before 0F1, which comes later \(position 3\)",
    ),
    "a receive after its use": (
        "0RECV_B1,0B1",
        "0B1,0RECV_B1",
        r"rank 0 runs 0B1 \(position 6\) before 0RECV_B1, which comes later \(position 7\)",
    ),
    "a backward before its forward": ("1F1,1B1", "1B1,1F1", r"rank 1 runs 1B1 \(position 5\) before 1F1, which comes later"),
    "a message too many": ("0B1\n", "0B1,0SEND_B1\n", "0SEND_B1 on rank 0 has no other end"),
    "an unknown micro-batch": ("0B1\n", "0B1,0F2\n", "0F2 names a stage or micro-batch that is not there"),
    "a mirror that is not there": ("0B1\n", "0B1,1SEND_G>1\n", "1SEND_G>1 names a mirror of stage 1 on rank 0, which holds none"),
}


@pytest.mark.parametrize(("old", "new", "message"), FAULTS.values(), ids=FAULTS)
def test_planted_faults(old, new, message):
    place = one_way(2, 2)
    check(read_csv(ORDER, place))
    assert ORDER.count(old) == 1
    order = read_csv(ORDER.replace(old, new), place)
    with pytest.raises(ScheduleError, match=message):
        check(order)


def test_messages_left_out_on_both_sides():
    order = read_csv("0F0,0B0\n1F0,1B0\n", one_way(2, 1))
    with pytest.raises(ScheduleError, match=r"rank 0 runs 0B0 .* before 0RECV_B0, which is missing"):
        check(order)


def test_messages_within_a_rank():
    """Where the same rank holds both stages no message is needed, and one is refused."""
    place = Placement(2, ((0, 0),), (0,))
    check(read_csv("0F0,1F0,1B0,0B0\n", place))
    assert lower(read_csv("0F0,1F0,1B0,0B0\n", place)).to_csv() == "0F0,1F0,1B0,0B0\n"
    with pytest.raises(ScheduleError, match="0SEND_F0 and its other end 1RECV_F0 are on one rank"):
        check(read_csv("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n", place))


def test_slots():
    lowered = lower(make_order("1f1b", 4, 8))
    assert check(lowered, slots=(4, 3, 2, 1)).peak_activations == (4, 3, 2, 1)
    for rank in range(4):
        slots = [4, 3, 2, 1]
        slots[rank] -= 1
        too_many = f"{rank}F{3 - rank}"
        with pytest.raises(ScheduleError, match=f"rank {rank} has {3 - rank} activation slots, and {too_many} .*is {rank}B0"):
            check(lowered, slots=slots)
    with pytest.raises(ScheduleError, match="slots has 2 entries for 4 ranks"):
        check(lowered, slots=(4, 4))


def exchange():
    order = make_order("chimera", 2, 2)
    sync = mirrors(order)
    return lower(order, sync=sync), sync


def edited(order, rank, edit):
    """The order with one rank's list, as texts, edited in place."""
    texts = [str(action) for action in order.ranks[rank]]
    edit(texts)
    ranks = list(order.ranks)
    ranks[rank] = tuple(map(Action.parse, texts))
    return Order(order.name, order.placement, tuple(ranks))


def test_gradients_before_the_last_backward():
    order, _ = exchange()
    early = edited(order, 0, lambda texts: texts.insert(texts.index("1B1"), texts.pop(texts.index("1SEND_G>1"))))
    with pytest.raises(
        ScheduleError, match=r"rank 0 sends gradients with 1SEND_G>1 .* before the last backward of that replica, 1B1"
    ):
        check(early)


def test_parameters_after_the_first_forward():
    order, _ = exchange()
    late = edited(order, 1, lambda texts: texts.insert(texts.index("0F1") + 1, texts.pop(texts.index("0RECV_P<0"))))
    with pytest.raises(
        ScheduleError, match=r"rank 1 takes parameters with 0RECV_P<0 .* after the first computation of that replica, 0F1"
    ):
        check(late)


def test_exchange_left_out():
    """Only who knows the edges can see that both ends of an exchange are missing."""
    order, sync = exchange()
    for kinds, rest in (("P", "refreshes the parameters"), ("G", "sends the gradients")):
        ranks = tuple(tuple(action for action in rank if action.kind.content not in kinds) for rank in order.ranks)
        bare = Order(order.name, order.placement, ranks)
        check(bare)
        with pytest.raises(ScheduleError, match=f"no action {rest} of stage 0's mirror on rank 1 with its owner, rank 0"):
            check(bare, sync=sync)
    with pytest.raises(ScheduleError, match="of a mirror that has no such owner"):
        check(order, sync=sync[:1])


def test_exchange_with_strangers():
    order, _ = exchange()
    with pytest.raises(ScheduleError, match="0SEND_P>2 names a mirror of stage 0 on rank 2, which holds none"):
        check(edited(order, 0, lambda texts: texts.insert(0, "0SEND_P>2")))
    with pytest.raises(ScheduleError, match="0SEND_P>1 is there twice"):
        check(edited(order, 0, lambda texts: texts.insert(0, "0SEND_P>1")))


def test_tied_parameters():
    """A mirror with two owners: the head of a one-way pipe uses the embedding of stage 0 and a table of stage 1."""
    order = make_order("1f1b", 4, 4)
    sync = (SyncEdge(3, mirror=3, owner=1), SyncEdge(3, mirror=3, owner=0))
    lowered = lower(order, sync=sync)
    assert [str(action) for action in lowered.ranks[3][:2]] == ["3RECV_P<0", "3RECV_P<1"]
    sent = [str(action) for action in lowered.ranks[3] if action.kind.value == "SEND_G"]
    assert sent == ["3SEND_G>0", "3SEND_G>1"]
    check(lowered, sync=sync)
    assert lower(order, sync=sync[::-1]) == lowered


def test_lower_refuses():
    order = make_order("chimera", 2, 2)
    with pytest.raises(ScheduleError, match="holds messages already"):
        lower(lower(order))
    with pytest.raises(ScheduleError, match="given twice"):
        lower(order, sync=[SyncEdge(0, 1, 0), SyncEdge(0, 1, 0, bytes=4)])
    with pytest.raises(ScheduleError, match="rank 1 holds the stages \\[1\\]"):
        lower(make_order("1f1b", 2, 2), sync=[SyncEdge(0, 1, 0)])
    with pytest.raises(ScheduleError, match=r"ranks are 0\.\.1"):
        lower(order, sync=[SyncEdge(0, 1, 7)])
    with pytest.raises(ScheduleError, match="mirror and owner are both rank 1"):
        SyncEdge(0, 1, 1)


def test_gradients_leave_as_soon_as_they_are_complete():
    """D=4, N=4: the end ranks' stage 3 replicas are done before their stage 0 backwards (paper, figure 4b)."""
    order = make_order("chimera", 4, 4)
    rank0 = [str(action) for action in lower(order, sync=mirrors(order)).ranks[0]]
    assert rank0.index("3SEND_G>3") < rank0.index("0B0")
    assert rank0[:2] == ["0SEND_P>3", "3RECV_P<3"]


def test_fast_enough_to_run_before_every_first_step():
    order = make_order("chimera", 8, 64)
    sync = mirrors(order)
    best = min(_seconds(order, sync) for _ in range(3))
    assert best < 0.2


def _seconds(order, sync):
    begin = time.process_time()
    check(lower(order, sync=sync), sync=sync)
    return time.process_time() - begin
