"""A batch divided and merged is the batch; what cannot be divided is refused with the names a user knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from fxchimera import BatchError
from fxchimera.runtime.batches.fingerprint import describe_batch, digest
from fxchimera.runtime.microbatch import ChunkSpecs, divide, merge

FIRST = ChunkSpecs()


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@given(rows=st.integers(1, 40), n=st.integers(1, 40), data=st.data())
def test_divided_and_merged_is_the_batch(rows: int, n: int, data: Any) -> None:
    """Sizes differ by at most one, the larger come first, and no row is lost, doubled or moved."""
    if rows < n:
        with pytest.raises(BatchError, match=f"{rows} rows cannot be divided into n_microbatches={n}"):
            divide((numbered(rows, 2),), {}, None, n, FIRST)
        return
    x, target = numbered(rows, 2), numbered(rows)
    batch = divide((x, 5), {"more": {"y": [x + 100]}, "flag": True}, target, n, FIRST)
    sizes = [microbatch.rows for microbatch in batch.microbatches]
    assert sum(sizes) == rows == batch.rows
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert [microbatch.index for microbatch in batch.microbatches] == list(range(n))
    for microbatch in batch.microbatches:
        assert microbatch.args[1] == 5
        assert microbatch.kwargs["flag"] is True
        assert microbatch.inputs[0] is microbatch.args[0]
    merged = merge([(m.args[0], m.kwargs["more"]["y"], m.target) for m in batch.microbatches], sizes)
    assert torch.equal(merged[0], x)
    assert torch.equal(merged[1][0], x + 100)
    assert torch.equal(merged[2], target)


def test_chunk_specs_in_every_form() -> None:
    specs = ChunkSpecs(args=(TensorChunkSpec(1), None, -1), kwargs={"k": 2}, target=None)
    args = (numbered(3, 4), numbered(5), numbered(2, 4))
    batch = divide(args, {"k": numbered(1, 1, 4), "first": numbered(4, 1)}, numbered(9), 2, specs)
    one, two = batch.microbatches
    assert torch.equal(torch.cat((one.args[0], two.args[0]), 1), args[0])
    assert one.args[1] is args[1]
    assert torch.equal(torch.cat((one.args[2], two.args[2]), -1), args[2])
    assert [m.kwargs["k"].shape for m in (one, two)] == [(1, 1, 2)] * 2
    assert [m.kwargs["first"].shape for m in (one, two)] == [(2, 1)] * 2
    assert two.target.shape == (9,)


def test_scalars_go_to_every_micro_batch() -> None:
    temperature = torch.tensor(2.0)
    batch = divide((numbered(4), temperature), {}, None, 4, FIRST)
    assert all(microbatch.args[1] is temperature for microbatch in batch.microbatches)


def test_one_tensor_given_twice_is_divided_twice() -> None:
    x = numbered(4)
    batch = divide((x, x), {"again": [x]}, x, 2, FIRST)
    for microbatch in batch.microbatches:
        assert all(torch.equal(found, microbatch.args[0]) for found in (microbatch.args[1], *microbatch.kwargs["again"]))


@pytest.mark.parametrize(
    ("args", "kwargs", "target", "text"),
    [
        (
            (numbered(4, 2), [numbered(4), numbered(3)]),
            {},
            None,
            r"0 \(4, 2\), argument 1\[0\] \(4,\), argument 1\[1\] \(3,\)",
        ),
        ((numbered(4),), {"mask": numbered(2)}, None, r"argument 0 \(4,\), mask= \(2,\)"),
        ((numbered(4),), {}, numbered(5), r"target \(5,\).*args_chunk_spec"),
        ((3,), {}, None, "no tensor with a batch dimension"),
        ((torch.tensor(1.0),), {}, None, "no tensor with a batch dimension"),
    ],
)
def test_batches_that_cannot_be_divided(args: Any, kwargs: Any, target: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        divide(args, kwargs, target, 2, FIRST)


def test_outputs_are_merged_by_what_they_are() -> None:
    """Rows are concatenated, scalars averaged by rows, what is equal is kept, what is not a tensor is the first's."""
    outputs = [
        {"rows": numbered(2, 3), "loss": torch.tensor(1.0), "table": torch.ones(7), "name": "x", "none": None},
        {"rows": numbered(1, 3), "loss": torch.tensor(4.0), "table": torch.ones(7), "name": "x", "none": None},
    ]
    merged = merge(outputs, [2, 1])
    assert torch.equal(merged["rows"], torch.cat((numbered(2, 3), numbered(1, 3))))
    assert merged["loss"].item() == 2.0
    assert torch.equal(merged["table"], torch.ones(7))
    assert merged["name"] == "x"
    assert merged["none"] is None


def test_outputs_that_cannot_be_merged() -> None:
    with pytest.raises(BatchError, match=r"output tensor 0.*shapes \[\(7,\), \(7,\)\] for \[2, 1\] rows"):
        merge([torch.ones(7), torch.zeros(7)], [2, 1])


def test_digests_tell_batches_apart() -> None:
    """Shapes, dtypes, plain values and the structure count; the numbers in the tensors do not."""

    def of(*args: Any, target: Any = None, **kwargs: Any) -> int:
        return digest(divide(args, kwargs, target, 2, FIRST))

    x = numbered(4, 2)
    different = [
        of(x), of(numbered(4, 3)), of(numbered(6, 2)), of(x.double()), of(x, 1), of(x, 2), of([x]), of(x, target=x), of(y=x),
        of(x, x), of(x.clone().requires_grad_()),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert of(x) == of(x + 1)
    assert all(0 <= value < 2**63 for value in different)


def test_a_batch_is_described_by_its_shapes() -> None:
    assert describe_batch(divide((numbered(5, 2),), {}, torch.zeros(5).long(), 2, FIRST)) == (
        "1 x (float32[3, 2], int64[3]) and 1 x (float32[2, 2], int64[2])"
    )
