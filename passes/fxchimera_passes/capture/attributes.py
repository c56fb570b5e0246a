"""What a forward keeps in the Python attributes of modules, and who reads and sets them.

    forward 1   self.state = s1                 kept: s1 is a tensor
    forward 2   ... self.state ... = s2         carried: it is read before it is set again
    block       self.scan.state = None          set from outside: not done when the block's inner calls are recorded

Attributes that a first recording found to be kept are taken out of their modules for the next one, so that a read before they are
set again reaches ``nn.Module.__getattr__``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.capture.signals import NeedClose
from fxchimera_passes.structure import flatten

if TYPE_CHECKING:
    from fxchimera_passes.capture.recorder import Recorder

__all__ = ["AttributeRule"]

_MISSING = object()


class AttributeRule:
    """The rule for one recording; ``parked`` are the kept attributes of the recording before it, by module name.

    ``kept`` maps a module's name to the attributes in which it keeps tensors, and whether they require a gradient.
    """

    def __init__(self, recorder: Recorder, parked: Mapping[str, Iterable[str]]) -> None:
        self.recorder = recorder
        self.kept: dict[str, dict[str, bool]] = {}
        self._parked: dict[tuple[int, str], Any] = {}
        self._names = {(name, attribute) for name, attributes in parked.items() for attribute in attributes}
        self._read: set[tuple[int, str]] = set()
        self._set: list[tuple[str, NeedClose]] = []

    def note(self, module: nn.Module, name: str, changed: Iterable[str]) -> None:
        """Remember which of the attributes that the module has just changed hold tensors."""
        for attribute in changed:
            tensors = flatten(vars(module).get(attribute))[0]
            if tensors:
                self.kept.setdefault(name, {})[attribute] = any(tensor.requires_grad for tensor in tensors)

    def carried(self, *, attached: bool) -> dict[str, tuple[str, ...]]:
        """Return the kept attributes that were read before they were set; with ``attached`` those that require a gradient."""
        model, found = self.recorder.model, dict[str, tuple[str, ...]]()
        for name, attributes in self.kept.items():
            module = id(model.get_submodule(name))
            names = tuple(sorted(a for a, grad in attributes.items() if (module, a) in self._read and (grad or not attached)))
            if names:
                found[name] = names
        return found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the parked attributes out, which :func:`model_untouched` puts back, and watch this thread's reads and writes."""
        owner, get, put = threading.get_ident(), nn.Module.__getattr__, nn.Module.__setattr__
        for name, attribute in self._names:
            module = self.recorder.model.get_submodule(name)
            self._parked[id(module), attribute] = vars(module).pop(attribute, _MISSING)
            if hasattr(type(module), attribute):  # the class has one, too, which hides a read
                self._read.add((id(module), attribute))

        def read(module: nn.Module, attribute: str) -> Any:
            value = self._parked.get((id(module), attribute), _MISSING) if threading.get_ident() == owner else _MISSING
            if (id(module), attribute) in self._parked:
                self._read.add((id(module), attribute))
            return get(module, attribute) if value is _MISSING else value

        def write(module: nn.Module, attribute: str, value: Any) -> None:
            if threading.get_ident() == owner:
                self._check_owner(module, attribute, value)
            put(module, attribute, value)

        nn.Module.__getattr__ = read  # type: ignore[method-assign]
        nn.Module.__setattr__ = write  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__getattr__ = get  # type: ignore[method-assign]
            nn.Module.__setattr__ = put  # type: ignore[method-assign]

    def _check_owner(self, module: nn.Module, attribute: str, value: Any) -> None:
        """An opened module's own code is not run again, so it must not set what a module that is called as a whole reads."""
        running, known = self.recorder.frames.innermost, self.recorder.writer.names.modules
        if not running.opened or module is running.module or id(module) not in known or attribute == "training":
            return
        name = known[id(module)]
        signal = NeedClose(running.module, f"forward sets {attribute} of {name or 'the model'}", user_line())
        if (name, attribute) in self._names:
            raise signal
        if vars(module).get(attribute, _MISSING) is not value:
            self._set.append((name, signal))

    def settle(self) -> None:
        """Ask to close a module that has set an attribute of one that runs inside a whole call, which might read it.

        What only recorded code reads is in the recording.
        """
        calls = {str(node.target) for node in self.recorder.writer.graph.nodes if node.op == "call_module"}
        for name, signal in self._set:
            parts = name.split(".")
            if calls & {".".join(parts[: i + 1]) for i in range(len(parts))}:
                raise signal
