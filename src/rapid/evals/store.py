"""A run directory: items.jsonl, manifest.json, summary.json.

Results are appended and flushed one by one, so that a killed run loses at most the line it was writing. Opening
the directory again drops such a half line; `missing` then names exactly what is left to do. A finished run is
rewritten in the order of its plan: apart from `timing`, a resumed run ends in the same file as one that was
never interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from rapid.errors import DocumentError, InvalidParameter
from rapid.evals.configuration import Key
from rapid.evals.files import write_bytes, write_json
from rapid.evals.manifest import check_same_run
from rapid.evals.results import Result, parse_line

ITEMS = "items.jsonl"
MANIFEST = "manifest.json"
SUMMARY = "summary.json"
_LOCK = ".lock"


@dataclass(frozen=True)
class Run:
    """A run as it stands on disk."""

    directory: Path
    manifest: dict[str, Any]
    results: list[Result]


def read_run(directory: str | Path) -> Run:
    """The run in `directory`, finished or not, without changing it."""
    directory = Path(directory)
    if not (directory / MANIFEST).is_file():
        raise DocumentError(f"{directory} holds no run: {MANIFEST} is missing")
    results, _ = _read_items(directory / ITEMS)
    return Run(directory, _read_manifest(directory / MANIFEST), results)


class RunStore:
    """The one writer of a run directory, made or resumed. Use it as a context manager, or `close` it.

    Raises `InvalidParameter` where the directory holds a run with other settings, models or data, or where
    another process is writing to it.
    """

    def __init__(self, directory: str | Path, manifest: dict[str, Any]) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidParameter(f"{directory} cannot be made: {error}; give another --output") from None
        self._lock = FileLock(self.directory / _LOCK, timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise InvalidParameter(f"{directory} is in use by another run; wait, or give another --output") from None
        try:
            self._open(manifest)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, manifest: dict[str, Any]) -> None:
        path = self.directory / MANIFEST
        items = self.directory / ITEMS
        if path.exists():
            check_same_run(_read_manifest(path), manifest, self.directory)
        elif items.exists() and items.stat().st_size:
            raise InvalidParameter(f"{items} has results but no {MANIFEST}; give another --output")
        else:
            write_json(path, manifest)
        results, end = _read_items(items)
        self._results = {result.key: result for result in results}
        self._file = items.open("ab")
        self._file.truncate(end)

    @property
    def results(self) -> list[Result]:
        """Everything finished so far."""
        return list(self._results.values())

    def missing(self, plan: Iterable[Key]) -> list[Key]:
        """What of the plan is not finished, in its order, once."""
        return [key for key in dict.fromkeys(plan) if key not in self._results]

    def append(self, result: Result) -> None:
        """Keep a finished result: it is on disk when this returns. Raises ValueError for a double."""
        if result.key in self._results:
            raise ValueError(f"{result.key} is already finished")
        self._file.write(f"{result.line()}\n".encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._results[result.key] = result

    def finish(self, plan: Sequence[Key], rows: Sequence[dict[str, Any]]) -> None:
        """Rewrite the results in the plan's order, any others after them, and write summary.json."""
        rank = {key: place for place, key in enumerate(dict.fromkeys(plan))}
        ordered = sorted(
            self._results.values(), key=lambda r: (rank.get(r.key, len(rank)), r.task, r.item, repr(r.key))
        )
        self._file.close()
        items = self.directory / ITEMS
        write_bytes(items, "".join(f"{result.line()}\n" for result in ordered).encode())
        self._file = items.open("ab")
        self._results = {result.key: result for result in ordered}
        write_json(self.directory / SUMMARY, {"rows": list(rows)})

    def close(self) -> None:
        """Close the file and let others write."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path} cannot be read: {error}; give another --output") from None
    if not isinstance(manifest, dict):
        raise DocumentError(f"{path} must hold a JSON object; give another --output")
    return manifest


def _read_items(path: Path) -> tuple[list[Result], int]:
    """The finished results, and the length in bytes of the lines they stand in.

    What follows the last newline was being written when the run was killed; so was a last line that is not
    JSON, which a crash of the machine can leave. Any other bad line is an error.
    """
    if not path.exists():
        return [], 0
    lines = path.read_bytes().split(b"\n")[:-1]
    results: dict[Key, Result] = {}
    end = 0
    for number, line in enumerate(lines, start=1):
        try:
            result = parse_line(line.decode("utf-8"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                break
            raise DocumentError(
                f"{path}, line {number} is not a result ({error!r}); delete that line to have it run again"
            ) from None
        results.setdefault(result.key, result)
        end += len(line) + 1
    return list(results.values()), end
