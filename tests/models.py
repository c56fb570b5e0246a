"""A small zoo of models that every test shares: tiny, seeded, one architecture feature each.

``MODELS[name](dtype=, seed=, batch=, dropout=)`` builds an :class:`Example`: the model in training mode, one batch of inputs, and
the target and loss function, or None for both when the model returns its own loss.  The weights depend on ``seed`` only, so
that two calls with other ``batch`` sizes give the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Builder", "Example"]

VOCABULARY, LENGTH, HIDDEN, HEADS, CLASSES = 48, 10, 16, 2, 5


class Example(NamedTuple):
    """A model in training mode, one batch for it, and how its loss is computed (``loss_fn`` None: the model returns it)."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    loss_fn: Callable[..., Tensor] | None

    def loss(self, output: Any, target: Tensor | None = None) -> Tensor:
        """Compute the loss of ``output``, which the model gave for this example's batch (or for another batch's ``target``)."""
        if self.loss_fn is None:
            return output.loss
        return self.loss_fn(output, self.target if target is None else target)


class Builder(Protocol):
    """Builds an example; same ``seed``, same weights."""

    def __call__(self, *, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example: ...


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """Seed torch for the construction of weights, yield a generator for the data, and restore torch's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed + 1)


def tokens(generator: torch.Generator, batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def padding(batch: int, length: int = LENGTH) -> Tensor:
    """An attention mask whose row i has 1 + i % 3 padded positions at its end.

    Every row has one: transformers leaves a mask of ones out, and a single row is a micro-batch too.
    """
    lengths = length - 1 - torch.arange(batch) % 3
    return (torch.arange(length) < lengths[:, None]).long()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class MLP(nn.Sequential):
    def __init__(self, dropout: float) -> None:
        layers: list[nn.Module] = []
        for index in range(16):
            layers.append(nn.Linear(HIDDEN, CLASSES if index == 15 else HIDDEN))
            if index < 15:
                layers += [nn.Tanh(), nn.Dropout(dropout)] if dropout else [nn.Tanh()]
        super().__init__(*layers)


def mlp(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    with seeded(seed) as data:
        model = MLP(dropout).to(dtype)
        x = torch.randn(batch, HIDDEN, generator=data).to(dtype)
        target = torch.randint(CLASSES, (batch,), generator=data)
    return Example(model.train(), (x,), {}, target, F.cross_entropy)


def gpt2(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=HIDDEN, n_layer=4, n_head=HEADS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with seeded(seed) as data:
        model = GPT2LMHeadModel(config).to(dtype)
        ids = tokens(data, batch)
    return Example(model.train(), (), {"input_ids": ids, "labels": ids.clone()}, None, None)


def bert(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=HEADS, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    with seeded(seed) as data:
        model = BertForSequenceClassification(config).to(dtype)
        ids, labels = tokens(data, batch), torch.randint(CLASSES, (batch,), generator=data)
    return Example(model.train(), (ids,), {"attention_mask": padding(batch), "labels": labels}, None, None)


def vit(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=HEADS, intermediate_size=32,
        num_labels=CLASSES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    with seeded(seed) as data:
        model = ViTForImageClassification(config).to(dtype)
        pixels = torch.randn(batch, 3, 8, 8, generator=data).to(dtype)
        target = torch.randint(CLASSES, (batch,), generator=data)
    return Example(
        model.train(), (), {"pixel_values": pixels}, target, lambda output, wanted: F.cross_entropy(output.logits, wanted)
    )


class Translator(nn.Module):
    """nn.Transformer between two embeddings and a head: the encoder's memory is read by every decoder layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.source, self.sink = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(VOCABULARY, HIDDEN)
        self.transformer = nn.Transformer(HIDDEN, HEADS, 4, 4, 2 * HIDDEN, dropout, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, source: Tensor, sink: Tensor) -> Tensor:
        weight = self.head.weight
        mask = nn.Transformer.generate_square_subsequent_mask(sink.shape[1], device=weight.device, dtype=weight.dtype)
        return self.head(self.transformer(self.source(source), self.sink(sink), tgt_mask=mask))


def nn_transformer(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    with seeded(seed) as data:
        model = Translator(dropout).to(dtype)
        source, sink, target = (tokens(data, batch, length) for length in (LENGTH, 7, 7))
    return Example(model.train(), (source, sink), {}, target, token_loss)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.act(self.norm1(self.first(x)))))
        y = self.drop(y)
        y += x
        return self.act(y)


class ResNet(nn.Module):
    """Convolutions, batch norm (buffers written by the forward) and in-place activations."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(ResidualBlock(8, dropout) for _ in range(8)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    with seeded(seed) as data:
        model = ResNet(dropout).to(dtype)
        pixels = torch.randn(batch, 3, 8, 8, generator=data).to(dtype)
        target = torch.randint(CLASSES, (batch,), generator=data)
    return Example(model.train(), (pixels,), {}, target, F.cross_entropy)


class Skip(nn.Module):
    """A U-net of linear layers: the i-th of four going down feeds the i-th from the end, over one to seven layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = F.dropout(torch.tanh(layer(x)), self.dropout, self.training)
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat((x, kept.pop()), dim=-1)))
        return self.head(x)


def skip(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    with seeded(seed) as data:
        model = Skip(dropout).to(dtype)
        x = torch.randn(batch, HIDDEN, generator=data).to(dtype)
        target = torch.randint(CLASSES, (batch,), generator=data)
    return Example(model.train(), (x,), {}, target, F.cross_entropy)


class RotaryBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor], length: int, scaled: bool) -> Tensor:
        cos, sin = rotary
        q, k, v = self.qkv(self.norm1(x)).view(-1, length, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4).unbind()
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        scores = q @ k.transpose(-1, -2)
        if scaled:
            scores = scores / math.sqrt(HIDDEN // HEADS)
        weights = self.dropout(scores.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(-1, length, HIDDEN))
        return x + self.mlp(self.norm2(x))


class MaskedRotary(nn.Module):
    """A causal transformer with a padding mask and a rotary table; the mask, the table, an int and a bool go to every block."""

    table: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(RotaryBlock(dropout) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        half = HIDDEN // HEADS // 2
        angles = torch.arange(32)[:, None] / 100 ** (torch.arange(half) / half)
        self.register_buffer("table", torch.cat((angles, angles), -1), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        allowed = causal & mask.bool()[:, None, None, :]
        angles = self.table[:length]
        rotary = (angles.cos(), angles.sin())
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, allowed, rotary, length, scaled=True)
        return self.head(self.norm(x))


def masked_rotary(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    with seeded(seed) as data:
        model = MaskedRotary(dropout).to(dtype)
        ids, target = tokens(data, batch), tokens(data, batch)
    return Example(model.train(), (ids,), {"mask": padding(batch)}, target, token_loss)


class Tied(nn.Module):
    """The output head is the embedding's own weight: first and last stage share a parameter."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Dropout(dropout)) for _ in range(8))
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def tied(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4, dropout: float = 0.0) -> Example:
    with seeded(seed) as data:
        model = Tied(dropout).to(dtype)
        ids, target = tokens(data, batch), tokens(data, batch)
    return Example(model.train(), (ids,), {}, target, token_loss)


MODELS: dict[str, Builder] = {
    "mlp": mlp, "gpt2": gpt2, "bert": bert, "vit": vit, "nn_transformer": nn_transformer, "resnet": resnet, "skip": skip,
    "masked_rotary": masked_rotary, "tied": tied,
}  # fmt: skip
