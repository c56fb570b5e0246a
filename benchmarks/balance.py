"""How evenly the models of the zoo are cut, and why not more evenly.

    python benchmarks/balance.py                           every model of the zoo, D = 2, 4, 8
    python benchmarks/balance.py hf_gpt2 --out runs/balance.md

Models are recorded and cut, never trained.  For each model and D, with analytic costs and the default schedule (chimera, N = 2D):

    load      heaviest stage / (sum / D)
    pair      heaviest sum of the two stages of a rank / (2 sum / D)
    makespan  simulated makespan / the same schedule's with D stages of sum / D each: what the cut costs
    bound     simulated makespan / (N sum / D): that and the schedule's own bubble
    auto      as bound, for the order that schedule="auto" finds for this cut, two copies of the weights, at most D in flight
    leaf      heaviest piece that no cut can part / (sum / D): load cannot be less

Seconds are processor time of one thread.  A model's memory is the high-water mark of a forked process: of recording it at D = 4,
and of one eager forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from forked import each, peak
from torch import nn

from fxchimera.planner.choose import choose_cut
from fxchimera.planner.table import costs_of
from fxchimera.schedule import Limits, auto
from fxchimera.schedule.families import make_order
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.simulate import simulate
from fxchimera_passes.analytic import NodeCosts, analytic
from fxchimera_passes.atoms import Atoms, contract
from fxchimera_passes.capture import capture
from fxchimera_passes.capture.opening import can_open
from fxchimera_passes.captured import Captured
from fxchimera_passes.liveness import Liveness, obstacle, sweep
from fxchimera_passes.plan import StagePlan

DEPTHS = (2, 4, 8)
USABLE = 0.6


@dataclass(slots=True)
class Row:
    """One model at one D.  Without a cut, ``reason`` says why; ``atom`` is the heaviest uncuttable piece, in words."""

    name: str
    group: str
    depth: int
    load: float = 0.0
    pair: float = 0.0
    makespan: float = 0.0
    bound: float = 0.0
    auto: float = 0.0
    leaf: float = 0.0
    indivisible: bool = False
    atom: str = ""
    pieces: int = 0
    empty: int = 0
    sent: int = 0
    skips: int = 0
    record_seconds: float = 0.0
    cut_seconds: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class Memories:
    """Bytes resident at most, in all and above what the process held before: the recording and the eager step."""

    record: int = 0
    record_above: int = 0
    eager: int = 0
    eager_above: int = 0


def measure(zoo: Any, name: str, memory: bool) -> tuple[list[Row], Memories]:
    """Record and cut one model for every D."""
    from tests.zoo_models import plain_loop, samples_of

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, (sample, _) = samples_of(zoo, name, None)
    found = Memories()
    if memory:
        recording = peak(lambda: capture(model, sample.args, sample.kwargs, num_stages=4), warm=small_step, limit=100)
        eager = peak(lambda: plain_loop(model, sample, 1, backward=True), warm=small_step, limit=100)
        found = Memories(recording.total, recording.above, eager.total, eager.above)
    return [cell(model, sample, Row(name, zoo.ZOO[name].group, depth)) for depth in DEPTHS], found


def small_step() -> None:
    """Make torch set up what it keeps for the life of a process."""
    small = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Linear(4, 2))
    small(torch.ones(1, 2, 4)).sum().backward()


def cell(model: nn.Module, sample: Any, row: Row) -> Row:
    """Record and cut a model for one D."""
    try:
        began = time.process_time()
        captured = capture(model, sample.args, sample.kwargs, num_stages=row.depth)
        row.record_seconds = time.process_time() - began
        costs = analytic(captured)
        live = sweep(captured)
        atoms = contract(captured, live, costs)
        describe(row, captured, live, costs, atoms)
        began = time.process_time()
        plan = choose_cut(captured, costs, make_order("chimera", row.depth, 2 * row.depth), ())
        row.cut_seconds = time.process_time() - began
    except Exception as error:
        row.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return row
    return judge(row, plan, costs)


def judge(row: Row, plan: StagePlan, costs: NodeCosts) -> Row:
    """Fill in what the cut is worth."""
    depth = row.depth
    forward, backward = (sum(table.values()) / depth for table in (costs.forward, costs.backward))
    even = forward + backward
    loads = [stage.cost_seconds for stage in plan.stages]
    row.load = max(loads) / even
    row.pair = max(a + b for a, b in zip(loads, reversed(loads), strict=True)) / (2 * even)
    row.sent = sum(value.meta.bytes for stage in plan.stages for value in stage.sent)
    row.skips = sum(value.meta.bytes for stage in plan.stages for value in stage.sent if value in stage.received)
    row.empty = sum(not stage.nodes for stage in plan.stages)
    if row.empty:
        row.reason = f"{row.empty} of the stages compute nothing"
        return row
    order = make_order("chimera", depth, 2 * depth)
    stages = costs_of(plan.stages)
    took = simulate(order, stages).makespan
    found = auto(depth, 2 * depth, stages, Limits(peak=depth, shapes=("bidirectional",)), seconds=0.2, cache=False)
    row.auto = found.certificate.makespan / (2 * depth * even)
    row.makespan = took / simulate(order, Costs.uniform(depth, forward, backward)).makespan
    row.bound = took / (2 * depth * even)
    return row


def describe(row: Row, captured: Captured, live: Liveness, costs: NodeCosts, atoms: Atoms) -> None:
    """Fill in the heaviest piece that no cut can part: how heavy, what it is, and whether it is one leaf."""

    def seconds(i: int) -> float:
        name = live.nodes[i].name
        return costs.forward.get(name, 0.0) + costs.backward.get(name, 0.0)

    even = sum(atoms.seconds) / row.depth or 1.0
    heaviest = max(range(len(atoms.seconds)), key=atoms.seconds.__getitem__)
    first, end = (*atoms.starts, len(live.nodes))[heaviest : heaviest + 2]
    row.pieces, row.leaf = len(atoms.seconds), atoms.seconds[heaviest] / even
    inside = [i for i in live.carried if first <= i < end]
    top = max(inside, key=seconds)
    share, node = seconds(top) / even, live.nodes[top]
    row.atom = f"{share:.2f} {node.target if isinstance(node.target, str) else getattr(node.target, '__name__', node.target)}"
    row.indivisible = share > 1 / USABLE
    if node.op == "call_module":
        module = captured.model.get_submodule(str(node.target))
        row.atom += f" ({type(module).__name__})"
        if any(True for _ in module.children()) and can_open(module):
            row.indivisible = False
            row.atom += ": " + captured.report.closed.get(str(node.target), "not opened")
    if len(inside) > 1 and share < 0.9 * row.leaf:
        row.atom += f"; {len(inside)} calls of {row.leaf:.2f} together: {obstacle(live, inside[len(inside) // 2])}"


# ---- the table


def usable(row: Row) -> bool:
    """Tell whether the cut is as even as asked for, or no cut could be because of one leaf."""
    return row.indivisible or (bool(row.load) and not row.empty and row.load <= 1 / USABLE)


def quantiles(values: Sequence[float]) -> str:
    """Write the median and what surrounds it."""
    if len(values) < 2:
        return "-"
    parts = statistics.quantiles(values, n=20, method="inclusive")
    return f"{parts[9]:.3f} (quarter {parts[4]:.3f}, three quarters {parts[14]:.3f}, 95 % {parts[18]:.3f}, worst {max(values):.3f})"


def table(rows: Sequence[Row], memories: dict[str, Memories], failed: dict[str, str]) -> str:
    """Write the results as Markdown."""
    lines = ["# How evenly the zoo is cut", ""]
    for depth in DEPTHS:
        here = [row for row in rows if row.depth == depth]
        lines += [f"## D = {depth}", "", *summary(here), ""]
    times = [row.record_seconds for row in rows if row.record_seconds]
    lines += ["## Recording", "", f"- seconds: {quantiles(times)}; over 10 s: {slow(rows)}"]
    lines += [f"- cut, seconds: {quantiles([row.cut_seconds for row in rows if row.cut_seconds])}"]
    known = {name: m for name, m in memories.items() if m.record and m.eager}
    ratios = {name: m.record / m.eager for name, m in known.items()}
    above = {name: m.record_above / 2**20 for name, m in known.items()}
    lines += [f"- peak memory of the process, recording / eager step: {quantiles(list(ratios.values()))}"]
    lines += [f"- MiB that recording adds: {quantiles(list(above.values()))}"]
    lines += [f"- MiB that the eager step adds: {quantiles([m.eager_above / 2**20 for m in known.values()])}", ""]
    lines += ["", *(f"- no result: {name}: {why}" for name, why in sorted(failed.items()))]
    return "\n".join(lines) + "\n"


def slow(rows: Sequence[Row]) -> str:
    """Name the recordings that take too long."""
    return ", ".join(f"{row.name} D={row.depth} {row.record_seconds:.1f}" for row in rows if row.record_seconds > 10) or "none"


def summary(rows: Sequence[Row]) -> list[str]:
    """Write the figures of one D, the worst ten, and the models that are not usable."""
    whole = [row for row in rows if row.makespan]
    good = sum(usable(row) for row in rows)
    even = sum(row.pair <= 1 / USABLE or row.indivisible for row in rows if row.pair)
    lines = [f"- {len(whole)} of {len(rows)} models cut; usable (heaviest stage at most 1/{USABLE}) {good}, {good / len(rows):.1%}"]
    lines.append(f"- usable by ranks, each of two stages: {even}, {even / len(rows):.1%}")
    fields = ("makespan", "bound", "auto", "load", "pair", "leaf")
    lines += [f"- {field}: {quantiles([getattr(row, field) for row in whole])}" for field in fields]
    lines += [
        "",
        "| model | makespan | load | pair | leaf | pieces | sent KiB (skips) | heaviest piece, in stages |",
        "|---" * 8 + "|",
    ]
    lines += [_line(row) for row in sorted(whole, key=lambda row: -row.makespan)[:10]]
    lines.append("")
    lines += [f"- not usable: {row.name}: load {row.load:.2f}, {row.atom}; {row.reason}" for row in rows if not usable(row)]
    return lines


def _line(row: Row) -> str:
    figures = [f"{value:.2f}" for value in (row.makespan, row.load, row.pair, row.leaf)]
    sent = f"{row.sent / 1024:.0f} ({row.skips / 1024:.0f})"
    return "| " + " | ".join([row.name, *figures, str(row.pieces), sent, row.atom.replace("|", "\\|")]) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.zoo_runner import _import_libraries, load_zoo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--groups", nargs="*", default=[])
    parser.add_argument("--out", type=Path, help="write the tables here as Markdown, and the rows beside it as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a model may take")
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args(arguments)
    zoo = load_zoo()
    _import_libraries()
    names = options.names or [name for name, entry in zoo.ZOO.items() if not options.groups or entry.group in options.groups]
    capture(nn.Linear(2, 2), (torch.ones(1, 2),), {})  # the modules that a first recording imports are in nobody's figures
    rows, memories, failed = list[Row](), dict[str, Memories](), dict[str, str]()
    for name, found in each(lambda name: measure(zoo, name, not options.no_memory), names, limit=options.limit, jobs=options.jobs):
        if isinstance(found, str):
            failed[name] = found
            continue
        rows += found[0]
        memories[name] = found[1]
        say = [f"D={row.depth} {row.makespan:.2f} {row.load:.2f} {row.leaf:.2f} {row.record_seconds:.1f}s" for row in found[0]]
        sys.stderr.write(f"{name:28s} {' | '.join(say)}\n")
    text = table(rows, memories, failed)
    whole = {"rows": [asdict(row) for row in rows], "memory": {k: asdict(m) for k, m in memories.items()}, "failed": failed}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
        options.out.with_suffix(".json").write_text(json.dumps(whole, indent=1))
    print(json.dumps(whole) if options.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
