"""How much work each module call of a forward does, measured while recording it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxchimera_passes.analytic import seconds_of

__all__ = ["Profile"]


@dataclass(slots=True)
class Profile:
    """The heaviest call of each module: estimated seconds, operators run, and which modules call it, the first one first."""

    seconds: dict[str, float] = field(default_factory=dict)
    operators: dict[str, float] = field(default_factory=dict)
    callers: dict[str, dict[str, None]] = field(default_factory=dict)

    def note(self, name: str, caller: str, flops: float, moved: float, operators: float) -> None:
        """Count one call of the module ``name`` that the module ``caller`` made: its operations, bytes moved, and operators."""
        self.seconds[name] = max(self.seconds.get(name, 0.0), seconds_of(flops, moved))
        self.operators[name] = max(self.operators.get(name, 0.0), operators)
        self.callers.setdefault(name, {})[caller] = None

    def share(self, name: str) -> float:
        """Return the part of the whole forward's work that one call of the module does.

        Each operator costs something to start, however little it does, so half of the part of their number counts where it is more.
        """
        seconds, operators = (table.get(name, 0.0) / (table.get("") or 1.0) for table in (self.seconds, self.operators))
        return max(seconds, operators / 2)
