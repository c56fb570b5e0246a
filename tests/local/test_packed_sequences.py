"""Packed sequences in the model's own forward: their batch sizes are known from the lengths, which are an input."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.local.toys import seeded, wrapped

VOCABULARY, WIDTH, STEPS = 11, 6, 7


class Packed(nn.Module):
    """Embedding, packed LSTM, two layers; pads back to ``total`` steps, or to the longest sequence."""

    def __init__(self, *, sort: bool = True, total: bool = True, reads: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.hidden, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.sort, self.total, self.reads = sort, total, reads

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=not self.sort)
        scale = sum(packed.batch_sizes.tolist()) if self.reads else 1
        total = tokens.shape[1] if self.total else None
        states, back = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=total)
        y: Tensor = self.out(torch.tanh(self.hidden(states))) * (back[:, None, None] + scale)
        return y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target[:, : output.shape[1]].flatten())


def batch(lengths: list[int], seed: int, *, shuffled: bool) -> tuple[Tensor, Tensor, Tensor]:
    lengths = lengths[::2] + lengths[1::2] if shuffled else lengths
    generator = torch.Generator().manual_seed(seed)
    tokens, target = (torch.randint(VOCABULARY, (len(lengths), STEPS), generator=generator) for _ in range(2))
    return tokens, torch.tensor(lengths), target


@pytest.mark.parametrize(("options", "n"), [({}, 1), ({}, 2), ({"sort": False}, 1), ({"reads": True}, 2), ({"total": False}, 2)])
def test_batches_of_several_lengths_train_as_in_the_plain_loop(options: dict[str, bool], n: int) -> None:
    model = seeded(lambda: Packed(**options))
    plain = copy.deepcopy(model)
    shuffled = options.get("sort", True)
    first = batch([7, 6, 5, 2], 0, shuffled=shuffled)
    with wrapped(model, *first[:2], loss_fn=loss_of, num_stages=4, n_microbatches=n, schedule="1f1b") as pipe:
        for tokens, lengths, target in (first, *(batch(own, 1, shuffled=shuffled) for own in ([7, 7, 5, 1], [6, 5, 5, 3])), first):
            loss = pipe.step(tokens, lengths, target=target)
            total = torch.zeros((), dtype=torch.float64)
            for a, b, c in zip(tokens.chunk(n), lengths.chunk(n), target.chunk(n), strict=True):
                part = loss_of(plain(a, b), c) / n
                part.backward()
                total += part.detach()
            torch.testing.assert_close(loss, total)
            for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                assert torch.equal(p.grad, q.grad), name
            model.zero_grad()
            plain.zero_grad()
