"""Keeps the caches of an engine's sessions within a budget: the least recently used ones go to disk.

A parked cache comes back when its session is next used. One that the disk cannot take is dropped, and read anew.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid import sealed
from rapid.backends.base import CacheState, Reader
from rapid.errors import InvalidParameter, RapidError
from rapid.paths import cache_dir


@dataclass
class _Entry:
    """`users`: calls that run now. `remove` deletes the file of a parked cache, at the latest at exit."""

    users: int = 0
    token_ids: list[int] | None = None
    path: Path | None = None
    remove: weakref.finalize[Any, Any] | None = None


class SessionMemory:
    """The readers of one engine, most recently used last. `max_bytes` None keeps all of them in memory.

    A session with an answer under way is never parked, so that the budget can be exceeded by those.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
            raise InvalidParameter(f"max_session_bytes must be a whole number of bytes, got {max_bytes!r}")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: weakref.WeakKeyDictionary[Reader, _Entry] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def using(self, reader: Reader, num_tokens: int) -> Iterator[None]:
        """While `reader` is used for a text of `num_tokens`: make room for it, bring its cache back if need be."""
        if self.max_bytes is None:
            yield
            return
        with self._lock:
            entry = self._entries.pop(reader, None) or _Entry()
            self._entries[reader] = entry
            self._make_room(reader, num_tokens, self.max_bytes)
            self._bring_back(reader, entry)
            entry.users += 1
        try:
            yield
        finally:
            with self._lock:
                entry.users -= 1

    def _make_room(self, reader: Reader, num_tokens: int, max_bytes: int) -> None:
        sizes = [(other, entry, other.num_bytes) for other, entry in self._entries.items() if other is not reader]
        total = max(reader.num_bytes, reader.bytes_for(num_tokens)) + sum(size for _, _, size in sizes)
        for other, entry, size in sizes:
            if total <= max_bytes:
                return
            if size and not entry.users and not other.busy:
                _park(other, entry)
                total -= size

    def _bring_back(self, reader: Reader, entry: _Entry) -> None:
        if entry.path is None or entry.token_ids is None or entry.remove is None:
            return
        try:
            with sealed.reading(entry.path) as file:
                file.verify()
                reader.restore(CacheState(entry.token_ids, file.tensors))
        except RapidError:
            reader.forget()  # what was lost is read anew
        entry.remove()
        entry.token_ids = entry.path = entry.remove = None


def _remove_abandoned(directory: Path) -> None:
    """Delete what killed processes left. A process on another machine that shares the directory reads anew."""
    if os.name != "posix":
        return
    for path in directory.glob("*-*.parked"):
        if not _runs(path.name.partition("-")[0]):
            path.unlink(missing_ok=True)


def _runs(process_id: str) -> bool:
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True  # another user's, or no process id: none of ours
    return True


def _park(reader: Reader, entry: _Entry) -> None:
    state = reader.export(len(reader.token_ids))
    try:
        directory = cache_dir() / "sessions"
        directory.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        handle, name = tempfile.mkstemp(dir=directory, prefix=f"{os.getpid()}-", suffix=".parked")
        os.close(handle)
        entry.remove = weakref.finalize(reader, Path(name).unlink, missing_ok=True)
        sealed.write(Path(name), {}, state.tensors, durable=False)
        entry.token_ids, entry.path = state.token_ids, Path(name)
    except (OSError, RapidError):
        if entry.remove:
            entry.remove()
    reader.forget()
