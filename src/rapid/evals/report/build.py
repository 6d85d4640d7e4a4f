"""A run directory in, its report out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rapid.errors import DocumentError
from rapid.evals.aggregate import gather
from rapid.evals.files import write_bytes, write_json
from rapid.evals.report import plots
from rapid.evals.report.comparisons import (
    compare,
    comparison_section,
    floor_section,
    rescue_section,
    rescues,
)
from rapid.evals.report.markdown import render_markdown
from rapid.evals.report.model import Report, Section, Table
from rapid.evals.report.page import render_html
from rapid.evals.report.scores import main_section, ruler_sections, split_sections
from rapid.evals.report.sensitivity import eta_points, eta_section, length_points, length_section
from rapid.evals.store import SUMMARY, Run, read_run
from rapid.evals.summary import summarise

HTML = "report.html"
MARKDOWN = "report.md"
PLOTS = "plots"


def build_report(run: Run) -> Report:
    """The report of a run with at least one result."""
    if not run.results:
        raise DocumentError(f"{run.directory} holds no finished items; run the evaluation first")
    cells = gather(run.results)
    comparisons = compare(cells)
    sections = [main_section(run.results, cells), *split_sections(cells), *ruler_sections(cells)]
    sections[0].figures.append(plots.score_figure(cells))
    sections.append(floor_section(cells))
    if comparisons:
        sections.append(comparison_section(comparisons))
    if rescued := rescues(comparisons):
        section = rescue_section(comparisons)
        section.figures.append(plots.rescue_figure(rescued))
        sections.append(section)
    if etas := eta_points(cells):
        section = eta_section(etas)
        section.figures.append(plots.eta_figure(etas))
        sections.append(section)
    if lengths := length_points(run.results):
        section = length_section(lengths)
        section.figures.append(plots.length_figure(lengths))
        sections.append(section)
    sections.append(_conditions(run.manifest))
    return Report("Evaluation report", sections)


def write_report(directory: str | Path) -> list[Path]:
    """Write report.html, report.md, plots/*.png and summary.json into a run directory; their paths."""
    run = read_run(directory)
    report = build_report(run)
    folder = run.directory / PLOTS
    folder.mkdir(exist_ok=True)
    written = []
    for figure in (figure for section in report.sections for figure in section.figures):
        written.append(folder / f"{figure.name}.png")
        write_bytes(written[-1], figure.png)
    write_bytes(run.directory / HTML, render_html(report).encode())
    write_bytes(run.directory / MARKDOWN, render_markdown(report, PLOTS).encode())
    write_json(run.directory / SUMMARY, {"rows": summarise(run.results)})
    return [run.directory / HTML, run.directory / MARKDOWN, *written, run.directory / SUMMARY]


def _conditions(manifest: Mapping[str, Any]) -> Section:
    """The manifest, one value a row."""
    rows: list[list[str]] = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        else:
            rows.append([name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)])

    add("", dict(manifest))
    return Section("Conditions", tables=[Table(["setting", "value"], rows)])
