"""What a message says before its values are known: ``f"{len(names)} names"`` is shown as ``{len(names)} names``.

Read from the source without running it.  A placeholder keeps the expression when it is short, else its most telling part, so that
the text can be read and searched; a message that another function makes is a placeholder as a whole.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

__all__ = ["fits", "template"]

_LONGEST = 32  # characters of an expression that is shown as it is
_OPEN, _CLOSE = "\x02", "\x03"  # around a placeholder, until braces of the text itself are told apart
_THROUGH = {"str", "repr", "list", "tuple", "sorted", "map", "float", "int", "_list", "place_of"}  # what shows its argument


def template(message: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """The text of ``message`` with ``{placeholders}``, all of its texts where a function chooses.

    Args:
        message: The expression.
        constants: The module's own names for texts; of a function that makes texts, an ``or`` of what it returns.
    """
    return " OR ".join(_text(one, constants) for one in _choices(message, constants)).replace(_OPEN, "{").replace(_CLOSE, "}")


def fits(message: ast.expr, constants: Mapping[str, ast.expr], seen: str) -> bool:
    """Whether ``seen`` can be what ``message`` became, whatever the values were."""
    texts = [re.split(f"{_OPEN}.*?{_CLOSE}", _text(one, constants)) for one in _choices(message, constants)]
    return any(re.fullmatch(".*".join(map(re.escape, parts)), seen, re.DOTALL) for parts in texts)


def _choices(message: ast.expr, constants: Mapping[str, ast.expr]) -> Sequence[ast.expr]:
    match message:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            made = constants.get(name)
            return made.values if isinstance(made, ast.BoolOp) else [message]
    return [message]


def _text(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, constants) for value in values)
        case ast.FormattedValue(value=value):
            return _placeholder(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="format")) if name in constants:
            return re.sub(r"\{.*?\}", lambda found: f"{_OPEN}{found[0][1:-1] or '...'}{_CLOSE}", _text(constants[name], constants))
        case ast.Call(func=ast.Attribute(value=inner, attr="replace")):
            return _text(inner, constants)
        case ast.Name(id=name) if name in constants:
            return _text(constants[name], constants)
    return _placeholder(node)


def _placeholder(node: ast.expr) -> str:
    return f"{_OPEN}{_readable(node)}{_CLOSE}"


def _readable(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[what]):
            return f"{_readable(what)}, ..."
        case ast.Attribute(value=ast.Call(func=ast.Name(id="type"), args=[what]), attr="__name__"):
            return f"type of {_readable(what)}"
        case ast.Call(func=ast.Name(id=name), args=[*_, what]) if name in _THROUGH:
            return _readable(what)
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return _readable(element)
        case ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other))) if one and other:
            return f"{one}|{other}"
    shown = re.sub(r"\bself\._?", "", ast.unparse(node))
    return shown if len(shown) <= _LONGEST else "..."
