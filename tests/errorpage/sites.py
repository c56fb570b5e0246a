"""Every place of the product that makes one of its own errors, or warns: found in the source, without running it.

A site's key has no line number, only module, function and the first words of the message, so that it stays when code around it
moves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tests.errorpage.templates import fits, template

__all__ = ["ROOT", "Site", "all_sites", "sites_of"]

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("fxchimera", "passes/fxchimera_passes")
_BASE = "FxChimeraError"
_WORDS = 6  # of a message that tell it from others of its function


@dataclass(frozen=True, slots=True)
class Site:
    """One place that makes an error or warns."""

    file: str  # below the root of the repository
    function: str  # with its class
    kind: str  # of error or warning
    template: str
    line: int
    column: int
    words: int = _WORDS
    _message: ast.expr = field(repr=False, compare=False, kw_only=True)
    _constants: Mapping[str, ast.expr] = field(repr=False, compare=False, kw_only=True)

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.file.removeprefix("passes/").removesuffix(".py").replace("/", ".")

    @property
    def key(self) -> str:
        """What names the site in the file of triggers."""
        return f"{self.module}:{self.function}: {' '.join(self.template.split()[: self.words])}"

    def fits(self, seen: str) -> bool:
        """Whether the message ``seen`` can have been made here."""
        return fits(self._message, self._constants, seen)


@cache
def all_sites() -> tuple[Site, ...]:
    """The sites of the whole product, by file and line."""
    files = (path for source in _SOURCES for path in sorted((ROOT / source).rglob("*.py")))
    return tuple(site for path in files for site in sites_of(str(path.relative_to(ROOT))))


@cache
def sites_of(file: str) -> tuple[Site, ...]:
    """The sites of one file, each with a key of its own."""
    tree = _tree(file)
    found = sorted(_found(tree, file, _texts(tree), ()), key=lambda site: (site.line, site.column))
    return tuple(_distinct(site, found) for site in found)


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def _texts(tree: ast.Module) -> dict[str, ast.expr]:
    """The module's names for texts, and what each function that makes texts returns, as an ``or``."""
    texts: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if node in tree.body:
                texts[name] = node.value
            case ast.FunctionDef(name=name, returns=ast.Name(id="str")):
                made = [found.value for found in ast.walk(node) if isinstance(found, ast.Return) and found.value is not None]
                texts[name] = ast.BoolOp(ast.Or(), made)
    return texts


@cache
def _kinds() -> frozenset[str]:
    """The names of the product's own errors, wherever they are defined."""
    paths = [path for source in _SOURCES for path in (ROOT / source).rglob("*.py")]
    classes = [
        node
        for path in paths
        if "Error" in path.read_text()
        for node in _tree(str(path.relative_to(ROOT))).body
        if isinstance(node, ast.ClassDef)
    ]
    kinds = {_BASE}
    while more := {c.name for c in classes if c.name not in kinds and any(ast.unparse(base) in kinds for base in c.bases)}:
        kinds |= more
    return frozenset(kinds)


def _found(node: ast.AST, file: str, constants: Mapping[str, ast.expr], inside: tuple[str, ...]) -> Iterator[Site]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _found(child, file, constants, (*inside, child.name))
            continue
        if isinstance(child, ast.Call) and child.args and (kind := _kind(child, node)):
            yield Site(
                file, ".".join(inside), kind, template(child.args[0], constants), child.lineno, child.col_offset,
                _message=child.args[0], _constants=constants,
            )  # fmt: skip
        yield from _found(child, file, constants, inside)


def _kind(call: ast.Call, parent: ast.AST) -> str | None:
    """The class of what ``call`` makes, or of its warning; None when it is another call."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _kinds():
            return name
        case ast.Attribute(value=ast.Name(id="warnings"), attr="warn"):
            named = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "category")]
            return ast.unparse(named[0]) if named else "UserWarning"
        case ast.Call(func=ast.Name(id="type")) if isinstance(parent, ast.Raise):  # an error raised again, with more words
            return _BASE
    return None


def _distinct(site: Site, others: list[Site]) -> Site:
    """``site`` with as many words in its key as tell it from the others."""
    clashing = [other for other in others if other is not site and other.key == site.key]
    longest = len(site.template.split())
    while clashing and site.words < longest:
        site = replace(site, words=site.words + 1)
        clashing = [other for other in clashing if replace(other, words=site.words).key == site.key]
    if clashing:
        raise ValueError(f"{site.file}:{site.line} and :{clashing[0].line} have the same message; let one place make it")
    return site
