"""A report as markdown. All of its texts are escaped: they show as they are, and start no markup."""

from __future__ import annotations

import html
import re

from rapid.evals.report.model import Report, Table

_MARKUP = re.compile(r"([\\`*_{}\[\]|~#])")


def render_markdown(report: Report, plots: str) -> str:
    """The report; figures are linked from the folder `plots`, relative to the file."""
    lines = [f"# {_text(report.title)}", ""]
    for section in report.sections:
        lines += [f"## {_text(section.title)}", ""]
        for paragraph in section.text:
            lines += [_text(paragraph), ""]
        for table in section.tables:
            lines += _table(table)
        for figure in section.figures:
            lines += [f"![{_text(figure.caption)}]({plots}/{figure.name}.png)", "", _text(figure.caption), ""]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    lines = [f"**{_text(table.title)}**", ""] if table.title else []
    lines.append(_row(table.columns))
    lines.append(_row(["---"] * len(table.columns), escape=False))
    lines += [_row(row) for row in table.rows]
    return [*lines, ""]


def _row(cells: list[str], *, escape: bool = True) -> str:
    return "| " + " | ".join(_text(cell) if escape else cell for cell in cells) + " |"


def _text(text: str) -> str:
    """One line of plain text: HTML and markdown characters lose their meaning."""
    return _MARKUP.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))
