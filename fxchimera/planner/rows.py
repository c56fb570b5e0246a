"""Tables for people: rows of cells, the first the heads, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["Rows", "as_html", "as_text"]

Rows = Sequence[tuple[str, ...]]


def as_text(rows: Rows) -> list[str]:
    """Return the lines of a table with columns of one width each, a rule below the heads."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def as_html(rows: Rows) -> str:
    """Return the table as HTML."""
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"
