"""What the demo shows while it runs: a progress bar on a terminal, plain lines elsewhere, nothing on ranks other than the first."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Printer", "StepReport"]

_PLAIN_LINES = 20  # lines of a run that is not on a terminal


class Printer:
    """Prints on one rank only.

    Args:
        active: Whether this rank prints.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.console = Console(quiet=not active, highlight=False, soft_wrap=True)

    def text(self, text: object) -> None:
        """Print as it is, without rich's markup."""
        self.console.print(str(text), markup=False)

    def title(self, text: str) -> None:
        """Print a heading with a line above it."""
        self.console.print(f"\n{text}", style="bold", markup=False)


class StepReport:
    """Reports the steps of a run; a context manager.

    Args:
        printer: Where to print.
        steps: Steps of the run.
        tokens_per_step: Tokens of one batch.
    """

    def __init__(self, printer: Printer, *, steps: int, tokens_per_step: int) -> None:
        self.printer, self.steps, self.tokens_per_step = printer, steps, tokens_per_step
        self.live = printer.active and printer.console.is_terminal
        self.every = max(1, steps // _PLAIN_LINES)
        self.smooth: float | None = None
        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=printer.console,
            disable=not self.live,
        )
        self.task = self.bar.add_task("training", total=steps, loss="-", speed="-")

    def __enter__(self) -> Self:
        self.start = time.monotonic()
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, done: int, loss: float) -> None:
        """Report that ``done`` steps are over and the loss of the last one; the loss shown is a running mean."""
        self.smooth = loss if self.smooth is None else 0.9 * self.smooth + 0.1 * loss
        speed = f"{done * self.tokens_per_step / (time.monotonic() - self.start):,.0f}"
        if self.live:
            self.bar.update(self.task, completed=done, loss=f"{self.smooth:.3f}", speed=speed)
        elif done % self.every == 0 or done in (1, self.steps):
            self.printer.text(f"step {done:>5}/{self.steps}  loss {self.smooth:.3f}  {speed} tokens/s")
