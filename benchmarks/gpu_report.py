"""Sections with a time box each, a JSON file that is whole at any moment, and a short table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the benchmark: it yields rows, and is stopped after `seconds`, between two rows."""

    name: str
    seconds: float
    rows: Callable[[], Iterable[Row]]


@dataclass
class Report:
    """What is written: `conditions`, the fate of each section, and rows that name their section."""

    path: Path
    conditions: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Row] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def write(self) -> None:
        """Replace the file in one step: a reader, or a killed process, never leaves half of one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"conditions": self.conditions, "sections": self.sections, "rows": self.rows}, indent=1)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def of(self, section: str, **wanted: Any) -> list[Row]:
        """Rows of a section that have all the `wanted` values."""
        return [r for r in self.rows if r["section"] == section and all(r.get(k) == v for k, v in wanted.items())]


def run_sections(
    sections: Iterable[Section],
    report: Report,
    total_s: float,
    log: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the sections in order within `total_s`; whatever one of them does, the next one gets its turn.

    status: `done`, `out of time` (rows so far are kept), `failed` (with the reason), `skipped` (nothing left).
    """
    start = clock()
    for section in sections:
        began = clock()
        end = min(began + section.seconds, start + total_s)
        log(f"{section.name} ...")
        status: Row = {"status": "skipped", "reason": f"the {total_s:g} s for everything were spent"}
        if began < end:
            status = _run(section, report, end, clock)
        report.sections[section.name] = {**status, "seconds": round(clock() - began, 2)}
        log(f"{section.name}: {status['status']} {status.get('reason', '')}".rstrip())
        report.write()


def _run(section: Section, report: Report, end: float, clock: Callable[[], float]) -> Row:
    rows: Iterator[Row] = iter(section.rows())
    try:
        while clock() < end:
            row = next(rows, None)
            if row is None:
                return {"status": "done"}
            report.rows.append({"section": section.name, **row})
    except Exception as error:  # a kernel that is missing or fails on one device must not cost the other sections
        return {"status": "failed", "reason": first_line(error)}
    return {"status": "out of time", "reason": "its time box was spent; later rows are missing"}


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


# Section -> the columns of its table.
TABLES: Mapping[str, tuple[str, ...]] = {
    "attention": ("context", "block", "path", "ms", "times_bound", "reason"),
    "steps": ("context", "block", "stack", "ms", "times_bound", "times_eager_transformers"),
    "draft": ("context", "drafter", "stack", "ms", "times_bound", "reason"),
    "decode": ("context", "method", "drafter", "per_token_acceptance", "acceptance_rate", "tokens_per_s", "times_lc"),
}
# Blocks shown of those measured.
_SHOWN_BLOCKS = (None, 1, 5, 11)


def print_tables(report: Report, out: TextIO) -> None:
    """The rows a reader looks for first; everything is in the JSON."""
    for section, columns in TABLES.items():
        rows = [r for r in report.of(section) if r.get("block") in _SHOWN_BLOCKS]
        if rows:
            note = " (synthetic acceptance)" if section == "decode" else ""
            out.write(f"\n{section}{note}\n")
            cells = [list(columns), *([_cell(row.get(c)) for c in columns] for row in rows)]
            widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
            out.writelines(
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n"
                for line in cells
            )
    for name, fate in report.sections.items():
        if fate["status"] != "done":
            out.write(f"{name}: {fate['status']}: {fate['reason']}\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
