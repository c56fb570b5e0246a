"""A buffer of a received message is used again when, and only when, nothing looks at it any more."""

from __future__ import annotations

import threading

import torch

from fxchimera.runtime.message import Form, Key
from fxchimera.runtime.messages.receivepool import ReceivePool
from fxchimera_passes.captured import TensorMeta
from tests.local.packed import pack


def take(pool: ReceivePool, size: int) -> torch.Tensor:
    """What a message's tensor is: another one on the buffer's memory, which the pool's user has let go of."""
    buffer = pool.take(size)
    tensor = torch.empty(0, dtype=torch.uint8).set_(buffer.memory.untyped_storage())
    buffer.taken = False
    return tensor


def test_a_view_keeps_the_buffer() -> None:
    pool = ReceivePool(4)
    first = take(pool, 256)
    assert first.shape == (256,)
    assert first.data_ptr() % 64 == 0
    address, view = first.data_ptr(), first[128:192].view(torch.float64)
    del first
    assert take(pool, 256).data_ptr() != address  # given back at once, as nobody keeps it
    assert pool.lent == 1
    del view
    assert pool.lent == 0
    assert address in {take(pool, 256).data_ptr(), take(pool, 256).data_ptr()}
    assert pool.made == 2


def test_a_buffer_is_not_lent_twice_while_it_is_filled() -> None:
    """Nothing but the pool's user looks at it then."""
    pool = ReceivePool(4)
    first = pool.take(64)
    assert pool.take(64) is not first
    assert (pool.made, pool.lent) == (2, 2)
    first.taken = False
    assert pool.take(64) is first


def test_autograd_keeps_the_buffer_until_the_backward() -> None:
    """A message is received, used in a product that autograd saves it for, and let go of."""
    meta, key, pool = TensorMeta((4,), (1,), torch.float64, True), Key(0, 1, 0), ReceivePool(4)
    message = pack(key, [torch.arange(4.0, dtype=torch.float64)], [meta])
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def received() -> torch.Tensor:
        buffer = pool.take(message.numel())
        buffer.bytes[:] = message.numpy()
        (value,) = buffer.unpack(key, Form([meta]))
        assert value is not None
        return (weight * value).sum()

    losses = [received(), received()]
    assert (pool.made, pool.lent) == (2, 2)
    losses[0].backward()
    assert pool.lent == 1
    losses.append(received())
    assert (pool.made, pool.lent) == (2, 2)
    losses[1].backward()
    losses[2].backward()
    assert torch.equal(weight.grad, 3 * torch.arange(4.0, dtype=torch.float64))
    assert pool.lent == 0


def test_no_more_free_buffers_are_kept_than_asked_for() -> None:
    pool = ReceivePool(2)
    held = [take(pool, 64) for _ in range(5)]
    assert pool.made == 5
    held.clear()
    held += [take(pool, 64) for _ in range(5)]
    assert pool.made == 8
    none = ReceivePool(0)
    for _ in range(3):
        take(none, 64)
    assert (none.made, none.lent) == (3, 0)


def test_other_sizes_are_not_mistaken() -> None:
    pool = ReceivePool(3)
    for size in (64, 128, 64, 128):
        assert take(pool, size).numel() == size
    assert pool.made == 2


def test_buffers_of_a_new_size_take_the_place_of_free_ones() -> None:
    pool = ReceivePool(2)
    held = [take(pool, 64), take(pool, 64)]
    del held[1:]
    for _ in range(3):
        assert take(pool, 128).numel() == 128
    assert (pool.made, pool.lent) == (3, 1)


def test_buffers_come_back_from_any_thread() -> None:
    pool = ReceivePool(2)
    held = [take(pool, 64)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    take(pool, 64)
    assert (pool.made, pool.lent) == (1, 0)
