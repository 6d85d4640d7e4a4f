"""Aligned tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "-"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, all others to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = []
    for first, *rest in (columns, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash for none."""
    return NONE if value is None else f"{value:,.{digits}f}"
