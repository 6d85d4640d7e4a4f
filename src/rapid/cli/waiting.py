"""How PyTorch's threads wait for each other: spinning where the machine is idle, asleep where it is busy.

A forward pass of a small model is some hundred parallel regions of a few microseconds. On an idle machine of 2 cores
waking sleeping threads took a third of a decode step (64 ms against 45); beside one other busy process, spinning ones
took three times as long (225 ms against 75). The choice has to be made before PyTorch is loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_LOADAVG = Path("/proc/loadavg")
_SAMPLES = 5
_BETWEEN_S = 0.005
# Other busy threads, as a share of the cores, that make a machine busy.
_BUSY = 1 / 8


def wait_by_load() -> None:
    """Let threads sleep while they wait if others use the processor; a setting of the user's stays."""
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ and is_busy(os.cpu_count() or 1):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def is_busy(cores: int, running: Callable[[], float] | None = None) -> bool:
    """Whether other processes want the processor now: most of a few looks find more than an eighth of the cores taken.

    running  how many threads run or wait to run, this one included.
    """
    looks = []
    for _ in range(_SAMPLES):
        looks.append((running or _running)() - 1 >= max(1, cores * _BUSY))
        time.sleep(_BETWEEN_S)
    return sum(looks) > _SAMPLES // 2


def _running() -> float:
    try:
        return float(_LOADAVG.read_text(encoding="ascii").split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1 + os.getloadavg()[0] if hasattr(os, "getloadavg") else 1
