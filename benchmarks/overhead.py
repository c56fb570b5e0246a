"""What the stage modules cost beside the model that they were cut from: the same forward and backward, in one process.

The stages run one after the other on the tensors that the stage before returned, and one backward goes through all of them: no
communication, no copies, no cut in the autograd graph.  What is left is what recording and cutting add: a generated forward for
each stage, modules opened into their inner calls, surroundings restored around single operations.

Both take turns, and in every other round they change places; the figures are medians of processor time, so that other work on the
machine matters little.  With ``--dropout`` the stages draw keyed masks, which is what makes them independent of the cuts.

    python benchmarks/overhead.py [--models gpt2 resnet50] [--stages 4] [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.capture.state import without_cache
from fxchimera_passes.keyed import microbatch_randomness
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan
from fxchimera_passes.structure import flatten

Table = dict[str, dict[str, float]]  # model -> figure -> value


@dataclass(frozen=True)
class Case:
    """A model with logits, and its batch."""

    model: nn.Module
    kwargs: dict[str, Tensor]


def gpt2(args: argparse.Namespace) -> Case:
    """GPT-2: 12 layers of width 256, 8000 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout)
    config = GPT2Config(n_layer=12, n_embd=256, n_head=8, vocab_size=8000, n_positions=128, bos_token_id=0, eos_token_id=0, **rates)
    return Case(GPT2LMHeadModel(config), {"input_ids": torch.randint(8000, (args.rows, 64))})


def resnet50(args: argparse.Namespace) -> Case:
    """ResNet-50 at 64 by 64 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return Case(ResNetForImageClassification(ResNetConfig(num_labels=1000)), {"pixel_values": torch.randn(args.rows, 3, 64, 64)})


MODELS: dict[str, Callable[[argparse.Namespace], Case]] = {"gpt2": gpt2, "resnet50": resnet50}


def eager_step(case: Case) -> None:
    """One forward and backward of the model itself."""
    loss_of(case.model(**case.kwargs).logits).backward()


def stages_step(stages: Sequence[nn.Module], reads: Sequence[tuple[int, ...]], inputs: Sequence[Tensor]) -> None:
    """One forward and backward of all stages."""
    values: tuple[Tensor, ...] = ()
    for stage, read in zip(stages, reads, strict=True):
        values = stage(*values, *(inputs[position] for position in read))
    loss_of(values[0]).backward()


def loss_of(logits: Tensor) -> Tensor:
    """Return a loss that costs next to nothing."""
    return logits.float().square().mean()


def measure(case: Case, args: argparse.Namespace) -> dict[str, float]:
    """Time both in turn; milliseconds of processor time, the median of the rounds, and the median of the rounds' ratios."""
    case.model.train()
    captured = capture(case.model, (), case.kwargs, num_stages=args.stages)
    graphs = split(captured, make_plan(captured, analytic(captured), args.stages))
    stages, reads = [graph.bind(case.model) for graph in graphs], [graph.stage.inputs for graph in graphs]
    inputs = flatten(((), case.kwargs))[0]
    with without_cache(case.model):  # as recorded
        spent = spend(case, partial(stages_step, stages, reads, inputs), args)
    ratios = [ours / eager for ours, eager in zip(spent["stages"], spent["eager"], strict=True)]
    return {
        **{f"{name}_ms": 1e3 * statistics.median(times) for name, times in spent.items()},
        "ratio": statistics.median(ratios),
        "nodes": float(sum(len(graph.graph.nodes) for graph in graphs)),
        "opened": float(len(captured.open_modules)),
    }


def spend(case: Case, ours: Callable[[], None], args: argparse.Namespace) -> dict[str, list[float]]:
    """Let both take turns; return the seconds of processor time of every round but the first."""
    spent: dict[str, list[float]] = {"eager": [], "stages": []}
    for number in range(args.rounds + 1):
        for name in ("eager", "stages") if number % 2 else ("stages", "eager"):
            case.model.zero_grad()
            keys: AbstractContextManager[object] = microbatch_randomness(0, number, 0) if args.dropout else nullcontext()
            began = time.process_time()
            if name == "eager":
                eager_step(case)
            else:
                with keys:
                    ours()
            if number:  # the first round warms up
                spent[name].append(time.process_time() - began)
    return spent


def show(table: Table) -> None:
    """Print the table."""
    print(f"{'model':<12}{'eager ms':>10}{'stages ms':>11}{'ratio':>8}{'nodes':>7}{'opened':>8}")
    for name, row in table.items():
        print(
            f"{name:<12}{row['eager_ms']:>10.1f}{row['stages_ms']:>11.1f}{row['ratio']:>8.3f}"
            f"{row['nodes']:>7.0f}{row['opened']:>8.0f}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models")
    parser.add_argument("--stages", type=int, default=4, help="stages that the model is cut into (D)")
    parser.add_argument("--rows", type=int, default=8, help="rows of the batch")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout rate of the models that have one")
    parser.add_argument("--rounds", type=int, default=15, help="rounds; medians are reported")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print."""
    args = parse()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = {}
    for name in args.models:
        torch.manual_seed(0)
        table[name] = measure(MODELS[name](args), args)
    if args.json:
        print(json.dumps(table))
    else:
        show(table)


if __name__ == "__main__":
    main()
