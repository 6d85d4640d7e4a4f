"""This process while it is measured: the settings of its allocator, and its memory."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# glibc's mallopt (malloc.h), and the values that keep freed blocks of any size in the process. Left to itself, malloc
# returns large blocks at every step and faults them in again: a third of a transformers step at 7.5K tokens.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM = 2**31 - 1
_MMAP = (2**30, 2**25)  # older glibc takes no more than 32 MiB
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def raise_malloc_thresholds() -> dict[str, int | None]:
    """Have malloc keep what is freed, for the rest of the process and so for whatever it compares.

    Returns the thresholds in force in bytes; None where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return {"mmap_threshold": None, "trim_threshold": None}
    mmap = next((size for size in _MMAP if mallopt(_M_MMAP_THRESHOLD, size) == 1), None)
    return {"mmap_threshold": mmap, "trim_threshold": _TRIM if mallopt(_M_TRIM_THRESHOLD, _TRIM) == 1 else None}


def restart_peak_rss() -> None:
    """Let `peak_rss` count from now on. Only Linux can; elsewhere the peak stays that of the whole process."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak_rss() -> int:
    """Largest resident memory of the process in bytes, since the last restart."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
