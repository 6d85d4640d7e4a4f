"""How much memory is free where models are to go, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rapid.errors import ModelError
from rapid.models.config import count_parameters
from rapid.models.sources import Source
from rapid.planning import DTYPE_BYTES, check_cache, check_loading, stored_dtype

_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: str) -> int:
    """Memory that can still be had on a device: of a CPU what the system calls available, or, where it does not say,
    all there is. Raises RuntimeError for a device that is not there."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(sources: Sequence[Source], dtype: str, device: str) -> None:
    """Raise `ModelError` with the figures where the weights of `sources` cannot be held together.

    Linear layers are packed after they were loaded whole. Models on the hub are passed over, and so is what loading
    itself will refuse: damaged files, devices and dtypes that are not there.
    """
    stored = stored_dtype(dtype)
    if stored not in DTYPE_BYTES or not device.startswith(("cpu", "cuda")):
        return
    try:
        parameters = sum(count_parameters(source) or 0 for source in sources)
        available = available_bytes(device)
    except (ModelError, RuntimeError, AssertionError):  # torch has the last two for a device that is not there
        return
    check_loading(parameters * DTYPE_BYTES[stored], available)


def require_cache_memory(num_tokens: int, num_bytes: int, device: str) -> None:
    """Raise `ModelError` with the figures where a cache for `num_tokens` has to grow by more than what is free."""
    if device.startswith(("cpu", "cuda")):
        check_cache(num_tokens, num_bytes, available_bytes(device))
