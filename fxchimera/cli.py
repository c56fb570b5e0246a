"""The command line, ``fxchimera VERB`` or ``python -m fxchimera VERB``, under torchrun too: demo, plan, simulate and compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fxchimera import __version__
from fxchimera.errors import FxChimeraError
from fxchimera.plan_cli import add_plan
from fxchimera.simulate_cli import add_verbs

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status (1 after one of our errors, whose message goes to the standard error)."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except FxChimeraError as error:
        print(f"fxchimera: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxchimera", description="Pipeline-parallel training of any torch module.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="verbs", required=True)
    add_plan(verbs)
    add_verbs(verbs)
    _add_demo(verbs.add_parser("demo", help="train a small GPT-2 on the Python language reference, on this machine's processors"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains transformers' GPT-2 (random weights) through the pipeline and compares it with the plain model. "
        "Alone it runs the ranks as threads; under `torchrun --nproc-per-node STAGES -m fxchimera demo` one process a rank."
    )
    add = parser.add_argument
    add("--stages", type=int, default=4, help="stages of the pipeline, D (default %(default)s)")
    add("--microbatches", type=int, default=8, help="micro-batches of a step, N (default %(default)s)")
    add("--schedule", default="chimera", help="auto, chimera, 1f1b or another family (default %(default)s)")
    add("--steps", type=int, default=400, help="optimizer steps (default %(default)s)")
    add("--layers", type=int, default=4, help="transformer blocks (default %(default)s)")
    add("--width", type=int, default=128, help="hidden width, a multiple of 32 (default %(default)s)")
    add("--seq", type=int, default=64, help="tokens of a row (default %(default)s)")
    add("--batch", type=int, default=16, help="rows of a batch (default %(default)s)")
    add("--vocab", type=int, default=1024, help="byte-pair tokens (default %(default)s)")
    add("--seed", type=int, default=0, help="of weights, dropout and data order (default %(default)s)")
    add("--out", type=Path, help="a folder for loss.csv, summary.json, trace.json and the trained model")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from fxchimera.demo import Options, run

    names = ("stages", "microbatches", "schedule", "steps", "layers", "width", "seq", "batch", "vocab", "seed", "out")
    run(Options(**{name: getattr(args, name) for name in names}))
    return 0
