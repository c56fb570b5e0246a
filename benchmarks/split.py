"""What it costs to run a backward in two parts: I and W of one layer beside its whole backward.

One thread of the CPU; the two ways take turns, the times are CPU seconds of this process
and the figures medians of ratios of one round, so other work on the machine matters little.  Gradients are compared bit for bit.
The C library is told to keep freed memory, as a training run with a steady heap and every caching allocator do; without that
(``--give-back``) the extra memory that waits for W is asked of the kernel again in every round, page by page.

    python benchmarks/split.py [--layers gpt,encoder,conv] [--batch 8] [--length 128] [--width 256] [--rounds 30] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.runtime.stages.deferral import Deferral
from fxchimera.runtime.stages.observation import Observation

Figures = dict[str, float]


class Block(nn.Module):
    """A GPT block: attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, length, width) to the same."""
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        grown: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + grown


class ConvBlock(nn.Module):
    """A residual block with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the same."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


def layer(name: str, args: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """Build a layer and an input of it."""
    torch.manual_seed(0)
    if name == "conv":
        return ConvBlock(args.channels), torch.randn(args.batch, args.channels, 32, 32)
    x = torch.randn(args.batch, args.length, args.width)
    if name == "encoder":
        return nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, dropout=0.0, batch_first=True), x
    return Block(args.width), x


def saved_bytes(nodes: Iterable[Any], module: nn.Module, *more: Tensor) -> int:
    """Add up the memory that autograd's graph below ``nodes`` keeps, without that of the parameters."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in more}
    waiting, seen = [node for node in nodes if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
        for attribute in dir(node):
            if attribute.startswith("_saved_") and isinstance(tensor := getattr(node, attribute), Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        if hasattr(node, "work"):
            waiting.append(node.work.output.grad_fn)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    return sum(size for pointer, size in storages.items() if pointer not in own)


def keep_heap() -> None:
    """Tell glibc not to return freed memory to the kernel."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD


def timed(run: Callable[[], object]) -> float:
    """Return the CPU seconds that a call takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


class Bench:
    """One layer, and the two ways to run it."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.x = module, x.requires_grad_()
        with Observation() as seen:
            y = module(x)
        self.allowed = seen.allowed([y], module.parameters())
        self.seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))

    def whole(self) -> Figures:
        """Forward and whole backward."""
        self.clear()
        forward = timed(lambda: self.keep(self.module(self.x)))
        kept = saved_bytes([self.y.grad_fn], self.module)
        backward = timed(lambda: torch.autograd.backward([self.y], [self.seed]))
        del self.y
        return {"F": forward, "kept": kept, "B": backward}

    def split(self) -> Figures:
        """Forward under the mode, then the two parts."""
        self.clear()
        deferral = Deferral(self.allowed)

        def run() -> None:
            with deferral:
                self.keep(self.module(self.x))

        figures: Figures = {"F": timed(run), "kept": saved_bytes([self.y.grad_fn], self.module)}
        figures["I"] = timed(lambda: deferral.input_part([self.y], [self.seed]))
        del self.y
        waiting = deferral.waiting
        figures["kept_I"] = saved_bytes([work.output.grad_fn for work, _ in waiting], self.module, *(g for _, g in waiting))
        del waiting
        figures["W"] = timed(deferral.weight_part)
        return figures

    def keep(self, y: Tensor) -> None:
        """Hold on to the output."""
        self.y = y

    def clear(self) -> None:
        """Drop all gradients."""
        self.x.grad = None
        self.module.zero_grad()

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the input and the parameters."""
        return [self.x.grad, *(parameter.grad for parameter in self.module.parameters())]


def measure(name: str, args: argparse.Namespace) -> Figures:
    """Measure one layer: medians of the ratios, by round."""
    bench = Bench(*layer(name, args))
    bench.whole()
    expected = bench.gradients()
    bench.split()
    equal = all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(bench.gradients(), expected, strict=True))
    rounds = [(bench.whole(), bench.split()) for _ in range(args.rounds)]

    def median(ratio: Callable[[Figures, Figures], float]) -> float:
        return statistics.median(ratio(whole, split) for whole, split in rounds)

    return {
        "bitwise": float(equal),
        "B_ms": median(lambda whole, _: 1e3 * whole["B"]),
        "I/B": median(lambda whole, split: split["I"] / whole["B"]),
        "W/B": median(lambda whole, split: split["W"] / whole["B"]),
        "(I+W)/B": median(lambda whole, split: (split["I"] + split["W"]) / whole["B"]),
        "F/F": median(lambda whole, split: split["F"] / whole["F"]),
        "kept_MiB": rounds[0][0]["kept"] / 2**20,
        "kept_split_MiB": rounds[0][1]["kept"] / 2**20,
        "kept_until_W_MiB": rounds[0][1]["kept_I"] / 2**20,
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="gpt,encoder,conv", help="comma-separated")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--give-back", action="store_true", help="leave the C library's memory settings alone")
    args = parser.parse_args()
    if not args.give_back:
        keep_heap()
    torch.set_num_threads(1)
    table = {name: measure(name, args) for name in args.layers.split(",")}
    if args.json:
        print(json.dumps(table))
        return
    for name, row in table.items():
        print(name, *(f"{key} {value:.3f}" for key, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()
