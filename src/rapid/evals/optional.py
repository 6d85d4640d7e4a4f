"""Imports of packages that only the evaluation needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rapid.errors import RapidError


def require(module: str, package: str) -> Any:
    """The module, or an error that says what to install."""
    try:
        return import_module(module)
    except ImportError:
        raise RapidError(f"{package} is not installed; install it with: pip install 'rapid-decoding[eval]'") from None
