"""A user's values as JSON that gives them back: dicts whose keys are numbers too, as the milestones of torch's MultiStepLR.

    {"milestones": {30: 1, 80: 1}}  ->  {"milestones": {"fxchimera:items": [[30, 1], [80, 1]]}}

JSON alone would make "30" of 30 without a word, and the scheduler would wait for epoch 30 for ever.
"""

from __future__ import annotations

from typing import Any

from fxchimera.errors import FxChimeraError

__all__ = ["from_json", "to_json"]

_ITEMS = "fxchimera:items"


def to_json(value: Any, name: str = "extra") -> Any:
    """Return a value that JSON can say; tuples become lists.  ``name`` is what an error calls it.

    Raises:
        FxChimeraError: It holds something that is no number, text, list or dict.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(one, f"{name}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, dict):
        pairs = [[to_json(key, f"a key of {name}"), to_json(one, f"{name}[{key!r}]")] for key, one in value.items()]
        if all(type(key) is str for key in value) and _ITEMS not in value:
            return dict(pairs)
        return {_ITEMS: pairs}
    raise FxChimeraError(f"extra must be made of numbers, text, lists and dicts, but {name} is a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """Undo :func:`to_json`."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ITEMS}:
        return {_key(from_json(key)): from_json(one) for key, one in value[_ITEMS]}
    return {key: from_json(one) for key, one in value.items()}


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, list) else value
