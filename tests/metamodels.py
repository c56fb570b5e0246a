"""Models to be built on the meta device, each with another way to begin, and one batch for them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["Mixed", "Silent", "Titan", "llama", "on_meta", "tokens"]

VOCABULARY, WIDTH = 40, 16


def tokens(rows: int = 8) -> Tensor:
    """A batch of token numbers."""
    return torch.randint(1, VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(5))


def llama(*, tied: bool, layers: int = 4, width: int = WIDTH) -> LlamaForCausalLM:
    """A small Llama, whose rotary table is a buffer that no checkpoint holds."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def on_meta(build, *args, **kwargs) -> nn.Module:
    """Build a model without weights."""
    with torch.device("meta"):
        return build(*args, **kwargs)


class Positions(nn.Module):
    """Adds a table that is computed by ``reset_parameters``, as torch's modules do."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(length, WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        places = torch.arange(self.table.shape[0] * WIDTH, dtype=torch.float32).view(-1, WIDTH)
        self.table.copy_(torch.sin(places))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Mixed(nn.Module):
    """Tied weights, an LSTM, batch norm, attention, and a table, without a word about the whole model's beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.positions = Positions(6)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.rnn(self.positions(self.embed(x)))[0])
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Titan(nn.Module):
    """Begins as torchtitan's models do: one ``init_weights`` for everything, the table included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("table", self._table(), persistent=False)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def _table(self) -> Tensor:
        return torch.cos(torch.arange(6.0 * WIDTH).view(6, WIDTH))

    def init_weights(self) -> None:
        self.table = self._table()
        nn.init.normal_(self.embed.weight)
        for depth, layer in enumerate(self.layers):
            nn.init.trunc_normal_(layer.weight, std=0.02 / math.sqrt(depth + 1))
            nn.init.constant_(layer.bias, 0.5)
        self.head.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.table
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


class Silent(nn.Module):
    """Has a scale and a table of which nobody says how they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale + self.table)
