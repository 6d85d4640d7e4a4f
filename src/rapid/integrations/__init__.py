"""Adapters for people who already use another library. Floor 5; each is imported when first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("lm_eval", "transformers"):
        return import_module(f"rapid.integrations.{name}")
    raise AttributeError(f"module 'rapid.integrations' has no attribute {name!r}")
