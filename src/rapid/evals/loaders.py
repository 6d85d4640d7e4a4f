"""Rows of a benchmark from a local file in the hub's own format, or from the hub by its dataset id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rapid.errors import DocumentError
from rapid.evals.optional import require

Row = dict[str, Any]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SUFFIXES = (".jsonl", ".json", ".parquet")


def read_rows(source: str | Path, filename: str | None = None) -> list[Row]:
    """The rows of `source`: a .jsonl, .json (one list) or .parquet file, or a hub dataset id.

    filename  the file to take from a directory or a hub dataset.
    Raises `DocumentError` where there is no such file, or it is not in its format.
    """
    path = Path(source)
    if path.is_dir() and filename is not None:
        path = path / filename
    if not path.is_file():
        path = _from_hub(str(source), filename)
    if path.suffix not in _SUFFIXES:
        raise DocumentError(f"{path}: task files are {', '.join(_SUFFIXES)}, got {path.suffix or 'no suffix'}")
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path} cannot be read as UTF-8 text: {error}") from None
    rows = _lines(path, text) if path.suffix == ".jsonl" else _list(path, text)
    if not rows:
        raise DocumentError(f"{path} holds no items")
    return rows


def _lines(path: Path, text: str) -> list[Row]:
    rows = []
    # str.splitlines would also split at U+2028 and its kind, which stand unescaped in real documents.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DocumentError(f"{path}, line {number} is not JSON: {error}") from None
    return _objects(path, rows)


def _list(path: Path, text: str) -> list[Row]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{path} is not JSON: {error}; lines of JSON belong in a .jsonl file") from None
    if not isinstance(rows, list):
        raise DocumentError(f"{path} must hold one JSON list of items")
    return _objects(path, rows)


def _objects(path: Path, rows: Iterable[Any]) -> list[Row]:
    checked = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DocumentError(f"{path}, item {number} must be a JSON object")
        checked.append(row)
    return checked


def _parquet(path: Path) -> list[Row]:
    parquet = require("pyarrow.parquet", "pyarrow")
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path} is not a parquet file: {error}") from None
    return rows


def _from_hub(source: str, filename: str | None) -> Path:
    """Download (or find in the hub's cache) one file of a dataset."""
    if filename is None or not _HUB_ID.fullmatch(source) or source.endswith(_SUFFIXES):
        raise DocumentError(f"{source}: no such file; give a task file or a known task's name")
    hub = require("huggingface_hub", "huggingface-hub")
    try:
        return Path(hub.hf_hub_download(source, filename, repo_type="dataset"))
    # The hub's client raises its own errors, OSError and its HTTP library's, depending on what fails.
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise DocumentError(
            f"{filename} of the dataset {source} cannot be fetched ({reason}); "
            f"download it elsewhere and give its path instead"
        ) from None


def text_field(row: Row, name: str, where: str) -> str:
    """A string field of a row; numbers are taken as their text."""
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DocumentError(f"{where}: field {name} must be text, got {type(value).__name__}")
    return value


def list_field(row: Row, name: str, where: str) -> list[str]:
    """A field that holds strings; one string alone is a list of one."""
    value = row.get(name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise DocumentError(f"{where}: field {name} must be a list of strings")
    return value
