"""What a message over torch's groups brings is what was sent: values, dtypes, layouts, and what is missing."""

from __future__ import annotations

import pytest
import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.message import Key
from fxchimera.runtime.messages.cargo import Cargo
from fxchimera_passes.captured import TensorMeta

KEY = Key(0, 1, 2)


def test_tensors_of_all_kinds_arrive_as_they_were() -> None:
    sent = [
        torch.randn(3, 4),
        None,
        torch.arange(6).view(2, 3).t(),  # dense in another order of dimensions
        torch.randn(8, 6)[::2, ::3],  # not dense: goes in row-major order
        torch.tensor([True, False]),
        torch.randn(5, dtype=torch.complex128),
        torch.tensor(-3, dtype=torch.int8),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor(-(2**62)),
        torch.tensor(1 + 2j, dtype=torch.complex128),  # more than a word
        torch.empty(0, 4),
        None,
    ]
    metas = [
        TensorMeta((7,) if i == 1 else (), (), torch.float32, False) if t is None else TensorMeta.of(t) for i, t in enumerate(sent)
    ]
    cargo = Cargo(metas)
    words = cargo.describe(KEY, sent)
    assert len(words) == cargo.words[0].shape[0]
    buffer = torch.full((cargo.bytes,), 255, dtype=torch.uint8)
    cargo.pack(sent, words, buffer)
    for tensor, found in zip(sent, cargo.unpack(words, buffer), strict=True):
        assert (tensor is None) == (found is None)
        if tensor is not None and found is not None:
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
            assert not tensor.is_contiguous() or found.stride() == tensor.stride()
    assert cargo.unpack(words, buffer)[2].stride() == sent[2].stride()


def test_another_shape_than_agreed_is_refused() -> None:
    cargo = Cargo([TensorMeta.of(torch.zeros(2, 3))])
    with pytest.raises(PipelineError, match=r"activations for stage 1, micro-batch 2: .* shape \(3, 2\)"):
        cargo.describe(KEY, [torch.zeros(3, 2)])


def test_a_message_of_nothing_still_has_a_byte() -> None:
    assert Cargo([TensorMeta((), (), torch.float32, False)]).bytes > 0
    assert Cargo([TensorMeta((0, 4), (4, 1), torch.float32, False)]).bytes > 0
