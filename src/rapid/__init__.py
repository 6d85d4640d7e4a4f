"""RAPID: ask long documents questions with open-weight language models, faster and better.

    engine = rapid.Engine.load()
    session = engine.open("report.pdf")
    print(session.ask("What was the revenue?"))

Names are loaded when first used: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapid.engine import Engine as Engine
    from rapid.errors import RapidError as RapidError
    from rapid.params import Retrieval as Retrieval
    from rapid.params import Sampling as Sampling
    from rapid.params import Speculation as Speculation
    from rapid.session import Session as Session
    from rapid.types import Answer as Answer
    from rapid.types import Document as Document

__version__ = "0.1.0"

_HOMES = {
    "Engine": "rapid.engine",
    "Session": "rapid.session",
    "Document": "rapid.types",
    "Answer": "rapid.types",
    "Retrieval": "rapid.params",
    "Sampling": "rapid.params",
    "Speculation": "rapid.params",
    "RapidError": "rapid.errors",
}
_MODULES = ("integrations", "errors", "params", "types")

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"rapid.{name}")
    raise AttributeError(f"module 'rapid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
