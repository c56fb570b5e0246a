"""Which of the values that arrive at a stage its nodes may write into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.capture import capture
from fxchimera_passes.inplace import overwritten
from tests.graph.recorded import WIDTH, build, data

# from what arrives at the second stage to what it writes in place, and whether that may be the same memory there
WAYS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "itself": (lambda x: x, True),
    "a view": (lambda x: x.view(-1), True),
    "what is contiguous already": (lambda x: x.contiguous(), True),
    "new memory": (lambda x: x * 2, False),
    "a copy": (lambda x: x.clone(), False),
    "what a message makes contiguous": (lambda x: x.contiguous(), True),
    "a copy of a transposed value": (lambda x: x.contiguous(), False),
}
ARRIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "what a message makes contiguous": lambda x: x[:1].expand(4, -1),
    "a copy of a transposed value": lambda x: x.t(),
}


class Writes(nn.Module):
    """Makes the value that arrives, ``tanh``, in the layout that the case wants; then writes into what the case makes of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        arrives = ARRIVES.get(self.way, lambda value: value)(torch.tanh(self.first(x)))
        return WAYS[self.way][0](arrives).mul_(2).sum() + arrives.sum()


@pytest.mark.parametrize("way", WAYS)
def test_what_may_be_written(way: str) -> None:
    model = build(Writes, way)
    nodes = list(capture(model, (data(),), {}).graph.nodes)
    last = "expand" if "message" in way else "t" if "transposed" in way else "tanh"
    place = next(i for i, node in enumerate(nodes) if node.name.startswith(last))
    assert (nodes[place] in overwritten([nodes[place]], nodes[place + 1 :], model)) == WAYS[way][1]
