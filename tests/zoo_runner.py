"""Every model of the zoo through the one line; a table by group and by failure kind.

    python -m tests.zoo_runner [names] [--groups custom hf-lm] [--out runs/zoo.md]

Each model runs in a process of its own, forked from one that has the libraries imported, and is ended after a time limit.  Cells:
N=1 with 1f1b, and N=2 with chimera where the batch divides and the plain model takes half of it (1f1b where two copies of each
stage are refused).  A cell is bitwise, close (within G1c), refused (our own error), WRONG, or a crash (a foreign error, or none
before the time limit); "eager" means that the plain model fails or does not repeat itself.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ZOO = Path(__file__).resolve().parents[2] / "shared" / "zoo" / "zoo.py"
CLASSES = ("bitwise", "close", "refused", "WRONG", "crash", "eager", "n/a")
LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "monai.networks.nets", "torch_geometric.nn", "e3nn.o3")

__all__ = ["ZOO", "Row", "load_zoo", "main", "run"]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one cell; ``kind`` is a short name of the failure, ``detail`` tells it in full."""

    name: str
    group: str
    n: int
    schedule: str
    verdict: str
    kind: str = ""
    detail: str = ""
    witness: str = ""
    seconds: float = 0.0
    wrap_seconds: float = 0.0
    balance: float = 0.0
    collects: bool = False
    notes: tuple[str, ...] = ()


def load_zoo(path: Path = ZOO) -> Any:
    """Import the zoo from outside this repository.

    Raises:
        FileNotFoundError: it is not there.
    """
    if not path.exists():
        raise FileNotFoundError(f"the zoo is not at {path}")
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module
    spec.loader.exec_module(module)
    return module


def run(zoo: Any, names: Sequence[str], *, limit: float, jobs: int = 1, say: Any = None) -> list[Row]:
    """Run the models ``names``, ``jobs`` at a time, each for at most ``limit`` seconds."""
    context = multiprocessing.get_context("fork")
    waiting, running, rows = list(names), [], []
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            parent, child = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(zoo, name, child), daemon=True)
            process.start()
            child.close()
            running.append((name, process, parent, time.monotonic()))
        time.sleep(0.02)
        for entry in list(running):
            found = _finished(zoo, entry, limit)
            if found is not None:
                running.remove(entry)
                rows += found
                for row in found:
                    if say is not None:
                        say(row)
    return rows


def _finished(zoo: Any, entry: tuple[str, Any, Connection, float], limit: float) -> list[Row] | None:
    """Return the rows of a process that is done, or out of time, which ends it; None while it may go on."""
    name, process, pipe, began = entry
    if pipe.poll():
        try:
            rows: list[Row] = pipe.recv()
        except EOFError:
            process.join()
            rows = [_failed(zoo, name, "process died", f"exit code {process.exitcode}")]
        process.join(5)
        if process.is_alive():
            process.kill()
        return rows
    if time.monotonic() - began > limit:
        process.kill()
        return [_failed(zoo, name, "hang", f"no result within {limit:g} s")]
    return None


def _failed(zoo: Any, name: str, kind: str, detail: str) -> Row:
    return Row(name, zoo.ZOO[name].group, 0, "", "crash", kind, detail)


def _child(zoo: Any, name: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    rows = []
    for n in (1, 2):
        rows.append(_cell(zoo, name, n))
        if rows[-1].verdict in ("eager", "refused", "crash"):
            break
    pipe.send(rows)


def _cell(zoo: Any, name: str, n: int) -> Row:
    from fxchimera.errors import FxChimeraError
    from tests.zoo_models import plain_loop, samples_of

    group, began, rows, schedule = zoo.ZOO[name].group, time.perf_counter(), None, "1f1b"
    try:
        if n == 1:
            model, (sample, _) = samples_of(zoo, name, None)
            plain_loop(model, sample, 1, backward=True)
        else:
            rows, schedule = _divisible(zoo, name, n), "chimera"
            if rows is None:
                return Row(name, group, n, schedule, "n/a", "the plain model takes no half batch")
    except Exception as error:
        return Row(name, group, n, schedule, "eager", "the plain model fails", f"{type(error).__name__}: {error}"[:300])
    try:
        return _compared(zoo, name, n, schedule, rows, began)
    except FxChimeraError as error:
        if schedule == "chimera" and 'schedule="1f1b"' in str(error):
            try:
                return _compared(zoo, name, n, "1f1b", rows, began)
            except Exception as second:
                error = second
        return _refusal(name, group, n, schedule, error, began)
    except Exception as error:
        return _refusal(name, group, n, schedule, error, began)


def _divisible(zoo: Any, name: str, n: int) -> int | None:
    """Find a batch that the plain model takes in ``n`` parts: four rows, else as many as the entry has; None without one."""
    from tests.zoo_models import plain_loop, samples_of

    for rows in (2 * n, zoo.B):
        try:
            model, (sample, second) = samples_of(zoo, name, rows)
            plain_loop(model, sample, n, backward=True)
            plain_loop(model, second, n, backward=True)
        except Exception:
            continue
        return rows
    return None


def _compared(zoo: Any, name: str, n: int, schedule: str, rows: int | None, began: float) -> Row:
    from tests.zoo_case import run_cell

    outcome = run_cell(zoo, name, n=n, schedule=schedule, rows=rows)
    wrong = [check for check in outcome.checks if check.verdict == "different"]
    near = [check for check in outcome.checks if check.verdict == "close"]
    verdict, kind, detail = "bitwise", "", ""
    if wrong:
        first = wrong[0]
        verdict, kind = "WRONG", first.what
        detail = "; ".join(f"{check.what} {check.detail} ({check.error:.2g})" for check in wrong[:6])
    elif near:
        verdict, kind = "close", "sums from three stages or more" if outcome.collects else "other"
        worst = max(near, key=lambda check: check.error)
        detail = f"{worst.what} {worst.detail} ({worst.error:.2g})"
    return Row(
        name, zoo.ZOO[name].group, n, schedule, verdict, kind, detail, outcome.witness, time.perf_counter() - began,
        outcome.wrap_seconds, outcome.balance, outcome.collects, tuple(outcome.notes),
    )  # fmt: skip


def _refusal(name: str, group: str, n: int, schedule: str, error: Exception, began: float) -> Row:
    from fxchimera.errors import FxChimeraError, PipelineError

    ours = isinstance(error, FxChimeraError) and not isinstance(error, PipelineError)
    detail = f"{type(error).__name__}: {error}"
    if not ours:
        lines = traceback.format_exception(error)
        detail += "\n" + "".join(lines[-6:])[-1800:]
    verdict = "refused" if ours else "crash"
    return Row(name, group, n, schedule, verdict, type(error).__name__, detail, seconds=time.perf_counter() - began)


# ---- the table


def table(rows: Sequence[Row], seconds: float) -> str:
    """Write the results as Markdown: counts by group, by failure kind, and every cell that is not bitwise."""
    lines = ["# The zoo through the one line (D=4)", "", f"{_summary(rows)}; {seconds:.0f} s.", ""]
    for n in sorted({row.n for row in rows if row.n}):
        lines += [f"## N={n}", "", *_counts([row for row in rows if row.n == n]), ""]
    lines += ["## By failure kind", "", "| class | kind | cells |", "|---|---|---|"]
    kinds = Counter((row.verdict, row.kind) for row in rows if row.verdict not in ("bitwise", "n/a"))
    lines += [f"| {verdict} | {kind} | {count} |" for (verdict, kind), count in kinds.most_common()]
    lines += ["", "## Cells that are not bitwise", "", "| model | N | schedule | class | what |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (CLASSES.index(row.verdict), row.name)):
        if row.verdict not in ("bitwise", "n/a"):
            text = " ".join(f"{row.kind}: {row.detail}".split())[:400].replace("|", "\\|")
            lines.append(f"| {row.name} | {row.n} | {row.schedule} | {row.verdict} | {text} |")
    return "\n".join(lines) + "\n"


def _counts(rows: Sequence[Row]) -> list[str]:
    lines = ["| group | models | " + " | ".join(CLASSES) + " |", "|---" * (len(CLASSES) + 2) + "|"]
    groups = {row.group: [other for other in rows if other.group == row.group] for row in rows}
    for name, members in [*sorted(groups.items()), ("all", list(rows))]:
        found = Counter(row.verdict for row in members)
        lines.append(f"| {name} | {len(members)} | " + " | ".join(str(found[verdict] or "") for verdict in CLASSES) + " |")
    return lines


def _summary(rows: Iterable[Row]) -> str:
    found = Counter(row.verdict for row in rows)
    return f"{sum(found.values())} cells: " + ", ".join(f"{found[verdict]} {verdict}" for verdict in CLASSES if found[verdict])


def _say(row: Row) -> None:
    text = " ".join(f"{row.kind} {row.detail}".split())[:230]
    sys.stdout.write(f"{row.verdict:8s} {row.name:28s} N={row.n} {row.schedule:8s} {row.seconds:5.1f}s {row.balance:.2f} {text}\n")
    sys.stdout.flush()


def _import_libraries() -> None:
    """Import what the entries need once, before the processes are forked; a missing library drops its own entries only."""
    sys.modules.setdefault("numba", types.SimpleNamespace(jit=lambda *_, **__: lambda function: function))  # type: ignore[arg-type]
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:
            sys.stdout.write(f"without {name}: {type(error).__name__}: {str(error)[:120]}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code counts the wrong models and the crashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="models to run; all by default")
    parser.add_argument("--groups", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("runs/zoo.md"))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a model may take")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    zoo = load_zoo()
    names = options.names or [name for name, entry in zoo.ZOO.items() if not options.groups or entry.group in options.groups]
    began = time.monotonic()
    _import_libraries()
    rows = run(zoo, names, limit=options.limit, jobs=options.jobs, say=_say)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(table(rows, time.monotonic() - began))
    options.out.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    sys.stdout.write(f"{_summary(rows)}; {time.monotonic() - began:.0f} s; the table is in {options.out}\n")
    return sum(row.verdict in ("WRONG", "crash") for row in rows)


if __name__ == "__main__":
    raise SystemExit(min(main(), 100))
