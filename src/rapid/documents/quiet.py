"""Keeps what parsers say about odd files away from the user's terminal, for the time of reading only."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Logger levels and warning filters belong to the process: two readers that save and restore them at once
# would leave them changed. Parsing is pure Python, so taking turns costs nothing.
_lock = threading.Lock()


@contextmanager
def quiet(logger: str | None = None) -> Iterator[None]:
    """Silences warnings and the named logger (with its children); the former state is restored at the end."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if logger is None:
            yield
            return
        named = logging.getLogger(logger)
        level = named.level
        named.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            named.setLevel(level)
