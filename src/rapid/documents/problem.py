"""How an unusable document is reported: one line that names it."""

from __future__ import annotations

from rapid.errors import DocumentError

SUPPORTED = "txt, md, html, pdf, docx"
_LONGEST_NAME = 200


def problem(name: str, message: str) -> DocumentError:
    """The error to raise: `NAME: message`, on one line whatever characters the name holds."""
    shown = name if name.isprintable() and name else repr(name)
    if len(shown) > _LONGEST_NAME:
        shown = f"{shown[: _LONGEST_NAME // 2]}…{shown[-_LONGEST_NAME // 4 :]}"
    return DocumentError(f"{shown}: {message}")
