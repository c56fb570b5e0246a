"""``fxchimera plan``: where a model would be cut, and what every stage and every rank would cost.

Nothing is trained and no process is started.  Weights may be on the meta device, so a model that no machine here could hold is
planned too.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxchimera.errors import FxChimeraError
from fxchimera.schedule import make_order, simulate

if TYPE_CHECKING:  # torch takes seconds to load, and the other verbs do without
    from fxchimera.planner.builders import Example
    from fxchimera.planner.draft import Auto, Draft
    from fxchimera.planner.formulas import StageFormulas
    from fxchimera.runtime.microbatch import MicroBatch
    from fxchimera.schedule import Costs, Order

__all__ = ["add_plan"]


def add_plan(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = verbs.add_parser("plan", help="print where a model would be cut, what it costs, and the memory of every rank")
    parser.description = (
        "TARGET is my_pkg.my_mod:build or file.py:build: a callable without arguments that returns model, (model, args), "
        "(model, args, kwargs) or (model, args, kwargs, loss_fn), or an object or dict with these names; args and kwargs are one "
        "batch. Weights may be on the meta device."
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="what returns the model and one batch")
    add("--stages", type=int, default=4, help="stages of the pipeline and ranks, D (default %(default)s)")
    add("--microbatches", type=int, default=8, help="micro-batches of a step, N (default %(default)s)")
    add("--schedule", default="auto", help="auto, or chimera, 1f1b, gpipe or another (default %(default)s)")
    add("--memory", help="the most that a rank may need, for instance 24GiB; or one size for each rank, with commas")
    add("--optimizer-values", type=float, default=2.0, help="numbers the optimizer keeps a parameter (default 2, AdamW)")
    add("--recompute", default="auto", help="none, selective, full, or one a stage, with commas; auto: the soonest within --memory")
    add("--cost", default="analytic", choices=("analytic", "measured"), help="flops and bytes, or seconds on this machine")
    add("--split-points", default="", help="modules that begin a stage, with commas, instead of the automatic cut")
    add("--input", action="append", default=[], metavar="NAME=DTYPE[SIZES]", help='replaces the batch: "ids=int64[16, 128]"')
    add(
        "--symbolic",
        nargs="?",
        const="batch",
        choices=("batch", "sequence"),
        help="also print what a stage costs as formulas in the rows of a micro-batch, and with 'sequence' in its length",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--svg", type=Path, help="a file for the picture of the simulated step")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    from fxchimera.planner.builders import build_example

    order = _order(args.schedule, args.stages, args.microbatches)
    example = build_example(args.target, args.input)
    first = _first_microbatch(example, args.microbatches)
    made = _draft(args, example, first, order)
    formulas = _formulas(made, first, args.symbolic)
    if args.svg is not None:
        _draw(args.svg, made.order, made.plan.costs)
    show = _as_json if args.json else _as_text
    sys.stdout.write(show(made, formulas) + "\n")
    return 0


def _order(schedule: str, stages: int, microbatches: int) -> Order | Auto:
    """The order of a family, or what asks for a search."""
    if schedule.lower() != "auto":
        return make_order(schedule, stages, microbatches)
    from fxchimera.planner.draft import Auto
    from fxchimera.runtime.batches.copies import allows_two_copies

    return Auto(stages, microbatches, lambda captured: allows_two_copies(captured, microbatches))


def _first_microbatch(example: Example, microbatches: int) -> MicroBatch:
    """Divide the batch as a pipeline would; the first micro-batch is the largest."""
    from fxchimera.runtime.microbatch import ChunkSpecs, divide

    return divide(example.args, example.kwargs, None, microbatches, ChunkSpecs()).microbatches[0]


def _draft(args: argparse.Namespace, example: Example, first: MicroBatch, order: Order | Auto) -> Draft:
    from fxchimera.planner.draft import draft

    return draft(
        example.model,
        first.args,
        first.kwargs,
        order,
        split_points=tuple(point.strip() for point in args.split_points.split(",") if point.strip()),
        cost=args.cost,
        memory=_memory(args.memory),
        optimizer_values=args.optimizer_values,
        recompute=args.recompute.split(",") if "," in args.recompute else args.recompute,
    )


def _formulas(made: Draft, first: MicroBatch, symbols: str | None) -> tuple[StageFormulas, ...]:
    from fxchimera.planner.formulas import stage_formulas

    return stage_formulas(made, first.args, first.kwargs, sequence=symbols == "sequence") if symbols else ()


def _memory(text: str | None) -> str | list[str] | None:
    return text.split(",") if text is not None and "," in text else text


def _draw(path: Path, order: Order, costs: Costs) -> None:
    from fxchimera.view.svg import gantt

    try:
        path.write_text(gantt(simulate(order, costs)), encoding="utf-8")
    except OSError as error:
        raise FxChimeraError(f"the picture cannot be written to {path}: {error}") from error


def _as_json(made: Draft, formulas: tuple[StageFormulas, ...]) -> str:
    from fxchimera.planner.describe import plan_as_dict

    found: dict[str, Any] = plan_as_dict(made.plan)
    if formulas:
        found["formulas"] = [
            {key: str(value) if key != "stage" else value for key, value in asdict(row).items()} for row in formulas
        ]
    return json.dumps(found)


def _as_text(made: Draft, formulas: tuple[StageFormulas, ...]) -> str:
    notes = [f"note: {note}" for note in made.cut.notes]
    rows = [
        f"stage {row.stage}: flops {row.flops}; bytes moved {row.moved_bytes}; activations {row.activation_bytes}; "
        f"sends {row.sent_bytes}"
        for row in formulas
    ]
    return "\n".join([str(made.plan), "", *rows, *[""] * bool(rows), str(made.plan.report), *notes])
