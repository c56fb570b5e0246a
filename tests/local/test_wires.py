"""Two ranks' transports in one process: order, contents, waits and broken connections of what goes over a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fxchimera import FxChimeraError, PipelineError
from fxchimera.runtime.failures import sharedfailure
from fxchimera.runtime.failures.failure import Cause, Failure, Limits
from fxchimera.runtime.failures.sharedfailure import SharedFailure
from fxchimera.runtime.grid import Grid
from fxchimera.runtime.message import Key
from fxchimera.runtime.messages.distributed import DistributedTransport
from fxchimera.runtime.processes import wires
from fxchimera.runtime.transport import Expected
from fxchimera_passes.captured import TensorMeta

DOWN, UP = (0, 1, "down-F"), (1, 0, "down-B")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells the cause of a lost connection here, so nobody waits for it."""
    monkeypatch.setattr(sharedfailure, "GRACE_SECONDS", 0.1)


def tensor(number: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(number))


def message(number: int, size: int) -> Expected:
    return Expected(DOWN, Key(0, 1, number), (TensorMeta.of(tensor(number, size)),))


def both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Call both at once; whatever either raises is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            second()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    first()
    thread.join()
    if errors:
        raise errors[0]


@contextmanager
def ranks(wait_seconds: float = 20.0) -> Iterator[tuple[list[SharedFailure], list[DistributedTransport]]]:
    """The two ends of both channels, each with its own view of failures."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [store, TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)]
    failures = [SharedFailure(Limits(wait_seconds), one, Grid(((0, 1),), rank)) for rank, one in enumerate(stores)]
    ends: list[Any] = [None, None]

    def make(rank: int) -> None:
        ends[rank] = DistributedTransport(rank, [DOWN, UP], failures[rank], {DOWN: 3, UP: 3})

    both(lambda: make(0), lambda: make(1))
    try:
        yield failures, ends
    finally:
        for end in ends:
            end.close()
        for failure in failures:
            failure.stop()


@pytest.mark.parametrize("sizes", [[5] * 300, [0, 1, 100], [1 << 20, 3, 1 << 18, 7, 1 << 20], [1 << 21] * 4])
def test_messages_arrive_whole_and_in_order_and_no_send_waits(sizes: list[int]) -> None:
    """Whether the receiver is there or not: far more is sent here than a connection holds."""
    expected = [message(number, size) for number, size in enumerate(sizes)]
    with ranks() as (_, (source, destination)):
        for _ in range(2):
            for number, size in enumerate(sizes):
                source.send(DOWN, expected[number].key, [tensor(number, size)], expected[number].metas)
            destination.post(expected)
            for number, size in enumerate(sizes):
                (found,) = destination.receive(DOWN, expected[number].key, "rank 1")
                assert found is not None
                assert torch.equal(found, tensor(number, size))


def test_a_small_message_follows_large_ones_of_the_step_before() -> None:
    """The helper reads the large ones; the small one, posted while these are still unread, must not overtake them."""
    large, small = message(0, 1 << 20), message(1, 4)
    with ranks() as (_, (source, destination)):
        for one, size in ((large, 1 << 20), (small, 4)):
            destination.post([one])
            source.send(DOWN, one.key, [tensor(one.key.microbatch, size)], one.metas)
        for one, size in ((large, 1 << 20), (small, 4)):
            (found,) = destination.receive(DOWN, one.key, "rank 1")
            assert found is not None
            assert torch.equal(found, tensor(one.key.microbatch, size))


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_wait_has_a_bound_and_says_who_waits(size: int) -> None:
    with ranks(wait_seconds=0.3) as (_, (_, destination)):
        destination.post([message(0, size)])
        with pytest.raises(PipelineError, match=r"stage 1 on rank 1 has waited 0\.3 s"):
            destination.receive(DOWN, Key(0, 1, 0), "stage 1 on rank 1")


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_wait_ends_when_another_rank_fails(size: int) -> None:
    with ranks() as (failures, (_, destination)):
        destination.post([message(0, size)])
        threading.Timer(0.1, failures[0].report, [Cause(0, "stage 0: ValueError: planted")]).start()
        start = time.monotonic()
        with pytest.raises(PipelineError, match="rank 0 failed: stage 0: ValueError: planted"):
            destination.receive(DOWN, Key(0, 1, 0), "rank 1")
        assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_lost_connection_names_rank_and_channel(size: int) -> None:
    """As when the other process dies in the middle of a message."""
    with ranks() as (_, (source, destination)):
        destination.post([message(0, size)])
        wire = source._outgoing[DOWN].wire
        wire.send(b"half")
        wire.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PipelineError, match=r"rank 0 failed: the connection on channel \(0, 1, 'down-F'\) broke"):
            destination.receive(DOWN, Key(0, 1, 0), "rank 1")
        with pytest.raises(PipelineError):
            source.send(DOWN, Key(0, 1, 0), [tensor(0, size)], message(0, size).metas)


def test_a_message_out_of_order_is_refused() -> None:
    with ranks() as (_, (_, destination)):
        destination.post([message(0, 4)])
        with pytest.raises(PipelineError, match="micro-batch 1, but activations for stage 1, micro-batch 0 was announced"):
            destination.receive(DOWN, Key(0, 1, 1), "rank 1")


def test_nothing_is_left_after_closing() -> None:
    """Neither connections nor threads, even where large messages have never been taken."""
    with ranks() as (_, (source, destination)):
        destination.post([message(number, 1 << 20) for number in range(3)])
        source.send(DOWN, Key(0, 1, 0), [tensor(0, 1 << 20)], message(0, 1 << 20).metas)
        ends = [one.wire for end in (source, destination) for one in (*end._outgoing.values(), *end._incoming.values())]
        assert len(ends) == 4
        assert any(thread.name == f"fxchimera-{DOWN}" for thread in threading.enumerate())
    assert [wire.fileno() for wire in ends] == [-1] * 4
    assert not any(thread.name == f"fxchimera-{DOWN}" for thread in threading.enumerate())


def test_a_stranger_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who finds the port before the other rank does, and says something else or nothing."""
    monkeypatch.setattr(wires, "_HELLO_SECONDS", 0.2)
    listen, strangers = wires._listen, list[socket.socket]()

    def overheard(*args: Any) -> socket.socket:
        server: socket.socket = listen(*args)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(20)):
            strangers.append(socket.create_connection(server.getsockname()))
            strangers[-1].sendall(said)
        return server

    monkeypatch.setattr(wires, "_listen", overheard)
    with ranks() as (_, (source, destination)):
        destination.post([message(0, 4)])
        source.send(DOWN, Key(0, 1, 0), [tensor(0, 4)], message(0, 4).metas)
        (found,) = destination.receive(DOWN, Key(0, 1, 0), "rank 1")
        assert found is not None
        assert torch.equal(found, tensor(0, 4))
        for stranger in strangers:
            with suppress(ConnectionError):
                assert stranger.recv(1) == b""
            stranger.close()


def test_a_rank_that_never_comes_is_named() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failure = SharedFailure(Limits(0.2), store, Grid(((0, 1),), 0))
    for channels in ([DOWN], [UP]):
        with pytest.raises(FxChimeraError, match=r"rank 1 has not connected within 0\.2 s.*wait_seconds="):
            DistributedTransport(0, channels, failure)
    failure.stop()


def test_a_rank_that_failed_before_it_was_reached_is_not_blamed_on_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listening ended with it; what it had to say comes a moment later."""
    monkeypatch.setattr(sharedfailure, "GRACE_SECONDS", 20.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failure = SharedFailure(Limits(20.0), store, Grid(((0, 1),), 0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("transports of pipeline 0/1/1", f"127.0.0.1 {server.getsockname()[1]} 00")
    timer = threading.Timer(0.3, failure.report, [Cause(1, "no such layer")])
    timer.start()
    with pytest.raises(PipelineError, match="rank 1 failed: no such layer"):
        DistributedTransport(0, [DOWN], failure)
    timer.join()
    failure.stop()


class Watching(Failure):
    """Notices at the third look that process 0 is frozen, as a pulse does."""

    looks = 0

    def look(self) -> None:
        self.looks += 1
        if self.looks == 3:
            self.report(Cause(0, "its process (7) has been stopped for 5 s"))


def test_who_closed_because_process_0_is_frozen_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It noticed first, and cannot tell: the store that it would tell by is frozen, too."""
    monkeypatch.setattr(sharedfailure, "GRACE_SECONDS", 20.0)
    cause = Cause(1, "the connection on channel (1, 2, 'down-F') broke: the other end has closed it")
    assert sharedfailure.resolve_cause(Watching(Limits()), cause).rank == 0
    with pytest.raises(PipelineError, match="rank 0 failed: its process"):
        sharedfailure.raise_cause(Watching(Limits()))


def test_an_interface_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ranks() as (_, (source, _)):
        assert source._outgoing[DOWN].wire.getsockname()[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(FxChimeraError, match="GLOO_SOCKET_IFNAME names 'nosuch0'"), ranks():
        pass
