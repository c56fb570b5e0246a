"""Twenty small models, each with one thing that real models do and that a recording can get wrong."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "WIDTH",
    "WORDS",
    "Autocast",
    "Checkpointed",
    "CustomFunction",
    "DataclassOut",
    "DictCache",
    "Embedded",
    "InplaceResidual",
    "KeywordOnly",
    "Layers",
    "LongSkip",
    "NoGradRegion",
    "Noise",
    "Parametrized",
    "PowersAndReads",
    "PythonCoins",
    "Selected",
    "Siamese",
    "SliceAssign",
    "StochasticDepth",
    "TensorHooks",
    "Vmapped",
]

WIDTH, WORDS = 6, 11


class Layers(nn.Module):
    """Eight linear layers; subclasses do something around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(self.net(a), self.net(b))


@dataclasses.dataclass
class Output:
    y: Any
    hidden: Any
    note: str | None = None


class DataclassOut(Layers):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Output:
        hidden: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
            hidden += (x,)
        return Output(y=x, hidden=hidden, note="ok")


class DictCache(nn.Module):
    """Every layer puts keys and values into a dict that goes around."""

    class Attention(nn.Module):
        """One layer and its number, which is its key."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.q, self.kv = index, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor, cache: dict[int, Any]) -> Tensor:
            k, v = self.kv(x).chunk(2, -1)
            if self.index in cache:
                k, v = (torch.cat(pair, 1) for pair in zip(cache[self.index], (k, v), strict=True))
            cache[self.index] = (k, v)
            return x + F.scaled_dot_product_attention(self.q(x), k, v)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DictCache.Attention(i % 4) for i in range(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        cache: dict[int, Any] = {}
        for layer in self.layers:
            x = layer(x, cache)
        return x, cache


class Step(torch.autograd.Function):
    """Rounds, and lets gradients through times two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 16) / 16

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


step = Step.apply  # the usual way: a name for torch's own function, bound before anything is recorded


class CustomFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = step(torch.tanh(layer(x)))
        return x


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=index % 2 == 1)
        return x


class TensorHooks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.9)
        return x


class Parametrized(Layers):
    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            norms = torch.nn.utils.parametrizations
            (norms.weight_norm if index % 2 else norms.orthogonal)(layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Autocast(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[:4]:
                x = torch.tanh(layer(x.float().double()))
        for layer in self.layers[4:]:
            x = torch.tanh(layer(x.double()))
        return x


class NoGradRegion(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.layers[0](x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + teacher, (x - teacher).detach()


class Noise(Layers):
    """Draws noise, a permutation and a number from a distribution that checks its arguments."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.training:
                x = x + 0.1 * torch.randn_like(x)
        if not self.training:
            return x
        share = torch.distributions.Uniform(x.new_tensor(0.2), x.new_tensor(0.8), validate_args=True).sample()
        return share * x + (1 - share) * x[torch.randperm(len(x))]


class StochasticDepth(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(1).item() < 0.4:
                continue
            x = x + torch.tanh(layer(x))
        return x


class PythonCoins(Layers):
    """Steered by Python's generator in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(y) if not self.training or random.random() < 0.5 else torch.sin(y) * random.uniform(0.5, 1.5)
        return x


class Vmapped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:7]:
            y = torch.tanh(layer(y))
            pairs = torch.vmap(lambda row, other: (row * other).sum() / (1 + row.square().sum()))(y, x)
            y = y + pairs[:, None]
        return self.layers[7](y)


class SliceAssign(Layers):
    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_zeros(len(x), len(self.layers), WIDTH)
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            kept[:, index] = x
            kept[:, index, 0] *= 2.0
        return kept.sum(1) + x


class InplaceResidual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            y = layer(x)
            y += x
            x = F.relu_(y)
        return x


class PowersAndReads(Layers):
    """``x ** 2`` and its like are methods of another name; the branch reads the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x[:, 0].sum() > 0):
            x = 1.5 - x
        for layer in self.layers:
            y = torch.tanh(layer(x)) ** 2
            x = y - 2 ** (-y) + 1 / (1 + y)
        return x


class Selected(Layers):
    """A result whose size the inputs decide."""

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x[scores[:, 0] > -9].square().mean()


class KeywordOnly(Layers):
    def forward(self, *, x: Tensor, scale: float = 1.0, mode: str = "tanh", **rest: Any) -> dict[str, Any]:
        function = getattr(torch, mode)
        for layer in self.layers:
            x = function(layer(x)) * scale
        return {"y": x, "n": len(rest), "nothing": None}


class LongSkip(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first, kept = x, []
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.1 * first
            kept.append(x)
        return torch.stack(kept).mean(0) @ self.layers[0].weight


class Embedded(nn.Module):
    """A tied head: its weight collects gradients from the first stage and from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.head.weight.t()
