"""Arrays on disk, by key. A cache that is damaged, full or forbidden costs time, never an answer."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def digest(parts: Iterable[str]) -> str:
    """A key for `parts`, in hexadecimal; the borders between them count."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


class ArrayCache:
    """One .npz file a key in `directory`; `warnings` says what could not be read or written.

    Files are written under another name and renamed, so that another process sees all of one or nothing. The
    checksums of the zip format find damage.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.warnings: list[str] = []

    def load(self, key: str, names: Sequence[str]) -> Arrays | None:
        """The arrays called `names` that were saved under `key`; None when there are none, or they are damaged."""
        path = self._path(key)
        try:
            # from memory: numpy leaves a damaged file open
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                return {name: file[name] for name in names}
        except FileNotFoundError:
            return None
        except Exception as error:  # damage shows as any of a dozen errors of zipfile, zlib and numpy
            self.warnings.append(f"cache file {path} is unreadable and was made again ({_line(error)})")
            return None

    def save(self, key: str, arrays: Arrays) -> None:
        """Keep `arrays` under `key`, if the disk allows it."""
        path = self._path(key)
        temporary: str | None = None
        packed = io.BytesIO()
        np.savez(packed, **arrays)  # type: ignore[arg-type]  # names could clash with `allow_pickle`
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                file.write(packed.getbuffer())
            os.replace(temporary, path)
        except OSError as error:
            reason = error.strerror or _line(error)
            warning = (
                f"the index was not cached in {self.directory}: {reason}; "
                "free some space, or set RAPID_CACHE_DIR to another directory"
            )
            if warning not in self.warnings:
                self.warnings.append(warning)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.npz"


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
