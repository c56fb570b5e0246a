"""Real compute: tokens per second of a small GPT-2, ours beside torch.distributed.pipelining, on the same stage modules.

Every rank is a process of one thread.  The model has 11 equal layers, and a head that weighs as much as a layer, so that cuts at
layers 3, 6 and 9 are even; torch's schedules run the very stage modules that ours are made of.  All schedules live in the same
processes and take turns, one step (gradients dropped, forward, backward) each a round; medians of the rounds.  Our step includes
the exchange of parameters and gradients between the two copies, and returns the loss on every rank; torch's does neither.

    tokens/s     tokens of the batch over latest end minus earliest start of a step over the ranks
    over 1F1B    the median of the rounds' ratios to the step of torch's 1F1B in the same round
    cpu          processor time of a step, of all threads, the mean of the ranks

    python benchmarks/real.py [--microbatches 2 4] [--rows 4] [--tokens 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from launched import on_ranks, run_step
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch_peers import PEERS

import fxchimera
from fxchimera.interop import torch_stages

OURS = ("1f1b", "chimera", "auto")
LAYERS = 11
PEER = ("torch", "1F1B")

Steps = dict[tuple[str, str], Callable[[], Any]]  # (whose, schedule) -> one step of it on this rank; the loss, where it is known
Table = dict[str, dict[str, dict[str, float]]]  # whose -> schedule -> figure -> value


def make_model(args: argparse.Namespace) -> nn.Module:
    """GPT-2 of 10 M parameters; no dropout, and a head of its own, since torch's pipelines cannot share one parameter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    width = args.width
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS, n_embd=width, n_head=8, vocab_size=12 * width, n_positions=args.tokens, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Logits(GPT2LMHeadModel(config))


class Logits(nn.Module):
    """The model's logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, tokens, vocabulary]."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of every next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def cuts(num_stages: int) -> list[str]:
    """The names of the layers that begin stages 1, 2, ..."""
    return [f"model.transformer.h.{(LAYERS + 1) * stage // num_stages}" for stage in range(1, num_stages)]


# ---------------------------------------------------------------------- ours


def make_ours(name: str, args: argparse.Namespace, microbatches: int, batch: Tensor, cleanup: ExitStack) -> Callable[[], Tensor]:
    """Wrap the model by the one line and return a step; "auto" chooses cuts and order."""
    pipe = cleanup.enter_context(
        fxchimera.pipeline(
            make_model(args),
            example_args=(batch,),
            loss_fn=next_token_loss,
            num_stages=args.stages,
            n_microbatches=microbatches,
            schedule=name,
            split_points=() if name == "auto" else cuts(args.stages),
        )
    )
    parameters = list(pipe.parameters())

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        return pipe.step(batch, target=batch)

    return step


# ---------------------------------------------------------------------- torch's


def make_theirs(name: str, args: argparse.Namespace, microbatches: int, batch: Tensor, rank: int) -> Callable[[], Tensor | None]:
    """Build one of torch's schedules on this rank and return a step; the loss is known on the rank of the last stage."""
    ours = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved-1f1b", "ZBVZeroBubble": "zbv"}[name]
    stages = torch_stages(
        make_model(args),
        example_args=(batch,),
        num_stages=args.stages,
        n_microbatches=microbatches,
        schedule=ours,
        split_points=cuts(args.stages * PEERS[name]),
    )
    runner = stages.runner(rank, get_schedule_class(name), loss_fn=next_token_loss)
    parameters = list(runner.parameters())

    def step() -> Tensor | None:
        for parameter in parameters:
            parameter.grad = None
        return runner.step(batch, target=batch)

    return step


# ---------------------------------------------------------------------- measuring


def work(rank: int, args: argparse.Namespace, microbatches: int) -> Table:
    """Build every schedule on this rank and let them take turns."""
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(12 * args.width, (args.rows * microbatches, args.tokens), generator=generator)
    with ExitStack() as cleanup:
        steps: Steps = {("ours", name): make_ours(name, args, microbatches, batch, cleanup) for name in args.ours.split(",")}
        for name in args.peers.split(","):
            try:
                steps["torch", name] = make_theirs(name, args, microbatches, batch, rank)
            except ValueError:  # torch's schedule refuses these numbers
                continue
        return measure(steps, args.rounds, batch.numel())


def measure(steps: Steps, rounds: int, tokens: int) -> Table:
    """Warm every schedule up, let them take turns, and fill the table; the losses of all must agree."""
    losses = {key: step() for key, step in steps.items()}
    known = [float(loss) for loss in losses.values() if loss is not None]
    if max(known) - min(known) > 1e-4:
        raise RuntimeError(f"the schedules do not compute the same: losses {losses}")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            found[key].append(run_step(step))
    table: Table = {"ours": {}, "torch": {}}
    for (whose, name), times in found.items():
        seconds = statistics.median(span for span, _ in times)
        ratios = [peer / span for (span, _), (peer, _) in zip(times, found[PEER], strict=True)]
        table[whose][name] = {
            "tokens_per_second": tokens / seconds,
            "over_1f1b": statistics.median(ratios),
            "step_ms": 1e3 * seconds,
            "cpu_ms": 1e3 * statistics.median(busy for _, busy in times),
        }
    return table


def show(table: Table, args: argparse.Namespace, microbatches: int) -> None:
    """Print the table of one number of micro-batches."""
    print(f"D={args.stages} N={microbatches}, micro-batches of {args.rows} rows of {args.tokens} tokens, {args.rounds} rounds")
    print(f"{'schedule':<24}{'tokens/s':>10}{'over 1F1B':>11}{'step ms':>9}{'cpu ms':>8}")
    for whose, rows in table.items():
        for name, row in rows.items():
            print(
                f"{whose + ' ' + name:<24}{row['tokens_per_second']:>10.0f}{row['over_1f1b']:>11.3f}"
                f"{row['step_ms']:>9.1f}{row['cpu_ms']:>8.1f}"
            )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="ranks (D)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4], help="micro-batches of a step (N), one run each")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are reported")
    parser.add_argument("--ours", default=",".join(OURS), help="our schedules, with commas between")
    parser.add_argument("--peers", default=",".join(PEERS), help="torch's schedules, with commas between; 1F1B among them")
    parser.add_argument("--json", action="store_true", help="print one JSON object, of a table for each N")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print."""
    args = parse()
    tables = {}
    for microbatches in args.microbatches:
        tables[microbatches] = on_ranks(work, args.stages, args, microbatches)
        if not args.json:
            show(tables[microbatches], args, microbatches)
    if args.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
