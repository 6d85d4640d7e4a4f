"""What a report is made of, before it is written as markdown or HTML. All texts are plain, not yet escaped."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot: the name of its file without suffix, its PNG, and what it shows."""

    name: str
    png: bytes
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, then tables, then figures."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A titled list of sections."""

    title: str
    sections: list[Section]


NONE = "–"


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction times 100."""
    return NONE if value is None else f"{100 * value:.{digits}f}"


def signed(value: float) -> str:
    """A fraction times 100, with its sign."""
    return f"{100 * value:+.1f}"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return NONE if value is None else f"{value:.{digits}f}"
