"""Where files of the user live on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Directory of everything that can be made again: converted weights, embeddings.

    `RAPID_CACHE_DIR` overrides the place the operating system has for it. The directory may not exist yet.
    """
    override = os.environ.get("RAPID_CACHE_DIR")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("rapid"))
