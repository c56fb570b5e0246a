"""The byte form of a message: every tensor comes back with its bits and layout, and a message for someone else is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxchimera import PipelineError
from fxchimera.runtime.message import Form, Key, Parcel
from fxchimera.schedule.action import Action
from fxchimera_passes.captured import TensorMeta
from tests.local.packed import pack, unpack

KEY = Key(0, 3, 7)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64)


def metas(*tensors: Tensor) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta.of(tensor) for tensor in tensors)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
payloads = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans(), st.randoms(use_true_random=False)), max_size=5)


@given(payloads)
def test_what_is_packed_comes_back(parts: list[tuple[tuple[int, ...], torch.dtype, bool, object]]) -> None:
    """Any dtype, zero-sized and 0-dimensional tensors, any order of dimensions in memory, absent tensors."""
    tensors, payload = [], []
    for shape, dtype, present, chooser in parts:
        order = list(range(len(shape)))
        chooser.shuffle(order)
        tensors.append(random(shape, dtype).permute(order))
        payload.append(tensors[-1] if present else None)
    agreed = metas(*tensors)
    buffer = pack(KEY, payload, agreed)
    assert buffer.numel() == Form(agreed).bytes
    assert buffer.dtype == torch.uint8
    for sent, got in zip(payload, unpack(KEY, buffer, agreed), strict=True):
        if sent is None or got is None:
            assert sent is got
            continue
        assert torch.equal(got, sent)
        assert got.dtype == sent.dtype
        assert got.stride() == torch.empty_like(sent).stride(), "a dense layout is kept: other layouts round otherwise"


def test_a_buffer_that_is_filled_again_holds_the_second_message_only() -> None:
    """Absent after present, another layout, another micro-batch."""
    first, second = random((3, 4), torch.float32), random((4, 3), torch.float32).t() + 1.0
    agreed = metas(first, first)
    parcel = Parcel(agreed)
    parcel.fill(KEY, [first, first])
    other = Key(0, 3, 8)
    parcel.fill(other, [None, second])
    absent, got = unpack(other, parcel.buffer, agreed)
    assert absent is None
    assert got is not None
    assert torch.equal(got, second)
    assert got.stride() == second.stride() == (1, 3)
    with pytest.raises(PipelineError, match="micro-batch 7"):
        unpack(KEY, parcel.buffer, agreed)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4)[:, ::2],
        torch.arange(4.0).expand(3, 4),
        torch.zeros(5)[2:2],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(float("nan")),
        torch.full((2,), torch.inf),
    ],
    ids=["strided", "expanded", "empty", "channels last", "nan", "inf"],
)
def test_layouts_that_are_not_dense_become_so(tensor: Tensor) -> None:
    (got,) = unpack(KEY, pack(KEY, [tensor], metas(tensor)), metas(tensor))
    assert got is not None
    torch.testing.assert_close(got, tensor, rtol=0.0, atol=0.0, equal_nan=True)
    assert got.stride() == torch.empty_like(tensor).stride()


def test_packing_copies_and_unpacked_tensors_may_be_written() -> None:
    tensor = torch.ones(3)
    buffer = pack(KEY, [tensor, tensor], metas(tensor, tensor))
    tensor.zero_()
    first, second = unpack(KEY, buffer, metas(tensor, tensor))
    assert first is not None
    assert second is not None
    version = second._version
    first.add_(1)
    assert first.tolist() == [2.0] * 3
    assert second.tolist() == [1.0] * 3
    assert second._version == version, "a write to one must not look like a write to the other"


def test_a_message_for_someone_else_is_refused() -> None:
    tensor = torch.ones(3)
    buffer = pack(KEY, [tensor], metas(tensor))
    with pytest.raises(PipelineError, match=r"expected activations for stage 3, micro-batch 8.*arrived in its place"):
        unpack(Key(0, 3, 8), buffer, metas(tensor))
    buffer[0] += 1  # a flipped bit in the identity
    with pytest.raises(PipelineError, match="arrived in its place"):
        unpack(KEY, buffer, metas(tensor))


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(4), r"\(4,\) and torch.float32.*\(3,\) and torch.float32"),
        (torch.ones(3).double(), "torch.float64.*torch.float32"),
        (torch.ones(3).to_sparse(), "sparse"),
    ],
)
def test_a_tensor_that_is_not_what_was_agreed_is_refused(tensor: Tensor, text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        pack(KEY, [tensor], metas(torch.ones(3)))


@pytest.mark.parametrize(
    ("send", "receive"),
    [("1SEND_F5", "2RECV_F5"), ("2SEND_B5", "1RECV_B5"), ("0SEND_P>3", "0RECV_P<0"), ("3SEND_G>2", "3RECV_G<1")],
)
def test_both_ends_give_a_message_one_key(send: str, receive: str) -> None:
    assert Key.of(Action.parse(send)) == Key.of(Action.parse(receive))


def test_keys_of_different_messages_differ() -> None:
    keys = [Key(flow, stage, mb) for flow in range(4) for stage in (0, 1, 255) for mb in (-1, 0, 1, 70_000)]
    assert len({key.word for key in keys}) == len(keys)
