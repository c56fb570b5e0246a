"""Every rank's packet comes to every rank, for any number of ranks, call after call, over a group made of queues."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from fxchimera import FxChimeraError
from fxchimera.runtime.groups import Packets

Mail = dict[tuple[int, int, int], "queue.Queue[torch.Tensor]"]  # (from, to, tag)


class Work:
    """What a send or a receive returns."""

    def __init__(self, mail: queue.Queue[torch.Tensor], buffer: torch.Tensor | None) -> None:
        self._mail, self._buffer = mail, buffer

    def wait(self) -> None:
        if self._buffer is not None:
            sent = self._mail.get(timeout=10)
            assert sent.shape == self._buffer.shape, "gloo aborts the process where the sizes differ"
            self._buffer.copy_(sent)


class Queues:
    """One rank's view of a group."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self._rank, self._size, self._mail = rank, size, mail

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Work:
        self._mail[self._rank, other, tag].put(tensors[0].clone())
        return Work(self._mail[self._rank, other, tag], None)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Work:
        return Work(self._mail[other, self._rank, tag], tensors[0])


def gather(size: int, calls: list[list[str]]) -> list[list[object]]:
    """Let ``size`` ranks make their calls at once; rank r sends r + 100 in its first call, r + 200 in its second."""
    mail: Mail = {(a, b, tag): queue.Queue() for a in range(size) for b in range(size) for tag in range(size)}
    found: list[list[object]] = [[] for _ in range(size)]

    def work(rank: int) -> None:
        packets = Packets(Queues(rank, size, mail))  # type: ignore[arg-type]
        for number, what in enumerate(calls[rank]):
            try:
                gathered = packets.begin(what, torch.tensor([rank + 100.0 * (number + 1)]))()
                found[rank].append([float(value) for value in gathered or []])
            except FxChimeraError as error:
                found[rank].append(str(error))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 21])
def test_every_packet_comes_to_every_rank(size: int) -> None:
    expected = [[rank + 100.0 * call for rank in range(size)] for call in (1, 2, 3)]
    assert gather(size, [["a step"] * 3] * size) == [expected] * size


def test_ranks_that_make_different_calls_are_told_and_can_go_on() -> None:
    found = gather(5, [["a step", "a step"]] * 4 + [["a save", "a step"]])
    assert all("rank 3: a step; rank 4: a save" in str(answers[0]) for answers in found)
    assert all(answers[1] == [200.0, 201.0, 202.0, 203.0, 204.0] for answers in found)


def test_what_does_not_fit_is_left_to_the_caller() -> None:
    """A big value is announced by its name only."""
    mail: Mail = {(0, 0, tag): queue.Queue() for tag in range(2)}
    assert Packets(Queues(0, 1, mail)).begin("big", torch.zeros(4096))() is None  # type: ignore[arg-type]
