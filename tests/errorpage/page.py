"""Writes ``tutorials/errors.md``: every error and warning of the product, with the message, where it is made, and its example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from tests.errorpage.groups import GROUPS, Group, group_of
from tests.errorpage.sites import ROOT, Site
from tests.errorpage.triggers import Trigger, function_of

__all__ = ["PAGE", "page"]

PAGE = ROOT / "tutorials" / "errors.md"
_LONGEST_SOURCE = 12  # lines of a test that is shown whole
_LONGEST_MESSAGE = 700  # characters
_HEAD = """\
# Every error, with an example

This page is made from the source by `python -m tests.errorpage`; do not edit it. It has all {count} places where fxchimera raises
an error of its own or warns. All errors derive from `fxchimera.FxChimeraError`; a `BatchError` or `ScheduleError` is also a
`ValueError`, a `PipelineError` a `RuntimeError`, and a `NonFiniteLossError` an `ArithmeticError`. Words in braces stand for what
was found. Below each text is the message as the example saw it; the example is a test, and the suite fails when it does not reach
that very place.
"""


def page(sites: Sequence[Site], triggers: Mapping[str, Trigger]) -> str:
    """The whole page."""
    chapters = [(group, [site for site in sites if group_of(site) is group]) for group in GROUPS]
    chapters = [(group, members) for group, members in chapters if members]
    contents = "\n".join(f"- [{group.title}](#{_anchor(group.title)}) ({len(members)})" for group, members in chapters)
    return "\n".join([_HEAD.format(count=len(sites)), contents, "", *(_chapter(*chapter, triggers) for chapter in chapters)])


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _chapter(group: Group, members: Sequence[Site], triggers: Mapping[str, Trigger]) -> str:
    return "\n".join([f"## {group.title}", "", group.advice, "", *("\n".join(_entry(site, triggers)) for site in members)])


def _entry(site: Site, triggers: Mapping[str, Trigger]) -> Iterator[str]:
    where = f"[`{site.module}`](../{site.file}), `{site.function}`"
    yield f"**{site.kind}**: {_escaped(site.template)}"
    yield ""
    trigger = triggers.get(site.key)
    if trigger is None:
        yield f"Made in {where}.\n"
        return
    yield from ("```text", _shortened(trigger.seen), "```", "")
    file, _, name = trigger.test.partition("::")
    function = function_of(trigger.test)
    source = _source(file, function) if function is not None else None
    example = f"[`{name.partition('[')[0]}`](../{file})" + (f" with `{trigger.case}`" if trigger.case else "")
    yield f"Made in {where}; example: {example}"
    yield ""
    if source:
        yield from ("```python", source, "```", "")


def _source(file: str, function: ast.FunctionDef) -> str | None:
    """The test's own lines, where they are few."""
    lines = (ROOT / file).read_text().splitlines()[function.body[0].lineno - 1 : function.end_lineno]
    if len(lines) > _LONGEST_SOURCE:
        return None
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", " ".join(text.split()))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE].rstrip() + " ..."
