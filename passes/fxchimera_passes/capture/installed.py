"""What a model installs on its first call (hooks, and flags that say so), so that a later recording needs no warm-up of its own.

A recording takes everything back that a forward changed.  Without this memory each one would have to run the model twice: once so
that it installs what it needs, and once to record a call that installs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fxchimera_passes.capture.state import holders

__all__ = ["Installed", "Look"]

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Change:
    """One table of hooks, or one attribute, of a module or of an object that it holds: what it was and what it became."""

    holder: Any
    name: str
    before: Any
    after: Any
    table: bool

    def as_before(self) -> bool:
        """Tell whether it is still, or again, what it was."""
        now = vars(self.holder).get(self.name, _ABSENT)
        return _same_table(now, self.before) if self.table else now is self.before

    def make(self) -> None:
        """Do it again."""
        if self.table:
            table = vars(self.holder)[self.name]
            table.clear()
            table.update(self.after)
        else:
            vars(self.holder)[self.name] = self.after


@dataclass(frozen=True, slots=True)
class Installed:
    """The changes of a first call."""

    changes: tuple[_Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes)

    def put(self) -> None:
        """Install it again, unless something of it is not as it was before the first call: then the model sees to it itself."""
        if all(change.as_before() for change in self.changes):
            for change in self.changes:
                change.make()


class Look:
    """The model's hooks and flags at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = [(holder, dict(vars(holder)), _tables(holder)) for holder in holders(model)]

    def since(self) -> Installed:
        """Return what has been installed since then."""
        changes: list[_Change] = []
        for holder, attributes, tables in self._seen:
            now = _tables(holder)
            changes += [
                _Change(holder, name, tables.get(name, {}), now[name], True)
                for name in now
                if not _same_table(now[name], tables.get(name, {}))
            ]
            for name, value in vars(holder).items():
                before = attributes.get(name, _ABSENT)
                if (value is None or isinstance(value, (bool, str))) and not (before is value or _same_text(before, value)):
                    changes.append(_Change(holder, name, before, value, False))
        return Installed(tuple(changes))


def _tables(holder: Any) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in vars(holder).items() if "hooks" in name and isinstance(value, dict)}


def _same_text(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one == other


def _same_table(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and one.keys() == other.keys() and all(one[key] is other[key] for key in one)
