"""Backends by name. Each is imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module

from rapid.backends.base import Backend
from rapid.errors import InvalidParameter
from rapid.params import Models
from rapid.types import StageProgress

_BACKENDS = {"local": ("rapid.backends.local", "LocalBackend")}


def load_backend(name: str, settings: Models, progress: StageProgress | None = None) -> Backend:
    """Load the models of `settings` on the backend called `name`."""
    if name not in _BACKENDS:
        raise InvalidParameter(f"backend must be one of {', '.join(_BACKENDS)}, got {name!r}")
    module, attribute = _BACKENDS[name]
    backend: Backend = getattr(import_module(module), attribute).load(settings, progress)
    return backend
