"""How much work each module call of a forward does, measured while recording it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Profile"]


@dataclass(slots=True)
class Profile:
    """The heaviest call of each module: flops, bytes moved, and from which modules it is called, the first one first."""

    flops: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    callers: dict[str, dict[str, None]] = field(default_factory=dict)

    def note(self, name: str, caller: str, flops: float, moved: float) -> None:
        """Count one call of the module ``name`` that the module ``caller`` made."""
        self.flops[name] = max(self.flops.get(name, 0.0), flops)
        self.moved[name] = max(self.moved.get(name, 0.0), moved)
        self.callers.setdefault(name, {})[caller] = None

    def share(self, name: str) -> float:
        """Return the part of the whole forward's work that one call of the module does."""
        table = self.flops if self.flops.get("") else self.moved
        return table.get(name, 0.0) / (table.get("") or 1.0)
