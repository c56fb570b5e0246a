"""The demo: train an existing model through the one line on real text, and show what a user wants to know about the run.

The model, the optimizer, the learning-rate scheduler and the loop are what anyone would write for one device; the pipeline is one
call.  The same program runs its ranks as threads, or one process a rank under torchrun, and gives the same losses.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fxchimera
from fxchimera.demo.data import Corpus, batches, make_corpus, python_reference
from fxchimera.demo.files import Curve, Summary, write_curve, write_model
from fxchimera.demo.model import learning_rate, make_gpt2, sample, warmup_cosine
from fxchimera.errors import FxChimeraError
from fxchimera.schedule import lower, make_order, simulate
from fxchimera.view import Drawing

if TYPE_CHECKING:
    from fxchimera.demo.view import Printer

__all__ = ["Options", "Result", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line of the demo sets; ``fxchimera demo --help`` explains each."""

    stages: int = 4
    microbatches: int = 8
    schedule: str = "chimera"
    steps: int = 400
    layers: int = 4
    width: int = 128
    seq: int = 64
    batch: int = 16
    vocab: int = 1024
    seed: int = 0
    out: Path | None = None

    def model(self) -> nn.Module:
        """Return the model with its first weights, the same ones at every call."""
        return make_gpt2(vocab_size=self.vocab, layers=self.layers, width=self.width, seq=self.seq, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to, the same on every rank: the curve and the summary."""

    curve: Curve
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demo:
    """One run: what was asked, what it trains on, where it prints, and the pipeline."""

    options: Options
    corpus: Corpus
    printer: Printer
    pipe: Any


def run(options: Options) -> Result:
    """Train, show, compare with the plain model, and write the files asked for.

    Raises:
        FxChimeraError: The demo's packages are missing, or the options do not fit together.
    """
    _require("transformers", "tokenizers", "rich")
    from fxchimera.demo.view import Printer

    start = time.monotonic()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    printer = Printer(active=os.environ.get("RANK", "0") == "0")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.stages))  # ranks share the cores, be they threads or processes
    corpus = make_corpus(python_reference(), vocab_size=options.vocab, seq=options.seq)
    if len(corpus.held_out) < options.batch:
        raise FxChimeraError(
            f"{len(corpus.held_out)} rows of {options.seq} tokens are held out, fewer than --batch {options.batch}"
        )
    printer.text(f"{len(corpus.train):,} tokens to train on, {corpus.held_out.numel():,} held out, {options.vocab} kinds")
    example = next(batches(corpus.train, rows=options.batch, seq=options.seq, seed=options.seed))
    with fxchimera.pipeline(
        options.model(),
        example_kwargs={"input_ids": example, "labels": example},
        num_stages=options.stages,
        n_microbatches=options.microbatches,
        schedule=options.schedule,
    ) as pipe:
        demo = _Demo(options=options, corpus=corpus, printer=printer, pipe=pipe)
        _show_plan(demo)
        curve = _train(demo)
        held_out = _held_out_loss(demo)
        summary = Summary(held_out_loss=held_out, unigram_nats=corpus.unigram_nats, seconds=time.monotonic() - start)
        _finish(demo, Result(curve=curve, summary=summary))
    return Result(curve=curve, summary=summary)


def _require(*packages: str) -> None:
    """Refuse to start without the packages of the demo."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise FxChimeraError(
                f"the demo needs {', '.join(packages)}, and {package} cannot be imported ({error}); "
                "install them: pip install transformers tokenizers rich (or '.[demo]' from a clone)"
            ) from error


def _show_plan(demo: _Demo) -> None:
    """Show where the model was cut, and the steps that 1F1B and Chimera would make of these costs."""
    demo.printer.title("the plan")
    demo.printer.text(demo.pipe.plan)
    demo.printer.text("(costs are counted flops and bytes at an accelerator's rates, so the cut is the same in every run)")
    plan, stages = demo.pipe.plan, demo.options.stages
    others = ["1f1b"] if stages % 2 else ["1f1b", "chimera"]
    orders = [make_order(name, stages, demo.options.microbatches) for name in others if plan.order.placement.num_stages == stages]
    for order in {**{other.name: other for other in orders}, plan.order.name: plan.order}.values():
        demo.printer.title(f"one step of {order.name}, predicted from these costs")
        demo.printer.text(Drawing((simulate(lower(order), plan.costs),)))


def _train(demo: _Demo) -> Curve:
    """Run the loop; return the loss and the learning rate of every step."""
    from fxchimera.demo.view import StepReport

    options, pipe = demo.options, demo.pipe
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=learning_rate(options.width), betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warmup_cosine, steps=options.steps))
    losses: list[float] = []
    rates: list[float] = []
    demo.printer.title("training")
    data = batches(demo.corpus.train, rows=options.batch, seq=options.seq, seed=options.seed)
    pipe.train()
    with StepReport(demo.printer, steps=options.steps, tokens_per_step=options.batch * options.seq) as report:
        for step in range(options.steps):
            tokens = next(data)  # [batch, seq]
            loss = pipe.step(input_ids=tokens, labels=tokens)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(float(scheduler.get_last_lr()[0]))
            scheduler.step()
            report.step(step + 1, losses[-1])
    return Curve(losses=tuple(losses), learning_rates=tuple(rates))


def _held_out_loss(demo: _Demo) -> float:
    """Return the mean loss over the held-out rows, in nats a token; batches are as large as training's and the rest is left out."""
    rows, size = demo.corpus.held_out, demo.options.batch
    parts = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
    total = 0.0
    for part in parts:
        total += demo.pipe.evaluate(input_ids=part, labels=part).item()
    return total / len(parts)


def _finish(demo: _Demo, result: Result) -> None:
    """Show the held-out loss, a line of text and the comparison with the plain model; write the files."""
    options, printer, summary = demo.options, demo.printer, result.summary
    printer.title("result")
    printer.text(f"held-out loss {summary.held_out_loss:.3f} nats a token after {summary.seconds:.0f} s in all")
    printer.text(f"knowing only how often each token occurs would give {summary.unigram_nats:.3f}")
    weights = demo.pipe.state_dict()  # collective: the whole model on the first rank, empty elsewhere
    if weights:
        plain = options.model()
        plain.load_state_dict(weights)
        prompt = torch.tensor(demo.corpus.tokenizer.encode("\n\nThe value of").ids)
        tokens = sample(plain, prompt, length=options.seq, seed=options.seed)
        printer.text(f"the trained model writes: {' '.join(demo.corpus.tokenizer.decode(tokens.tolist()).split())}")
        if options.out is not None:
            write_curve(options.out, result.curve, summary)
            write_model(options.out / "model", plain, demo.corpus.tokenizer)
    held = demo.corpus.held_out[: options.batch]
    printer.text(demo.pipe.verify(input_ids=held, labels=held))
    printer.title("a step as predicted, and the last step as it ran")
    printer.text(demo.pipe.draw())
    if options.out is not None:
        demo.pipe.trace(options.out / "trace.json")
        printer.text(f"written to {options.out}: loss.csv, summary.json, model/, and trace.json for https://ui.perfetto.dev")
