"""Options whose value is several, with commas between them."""

from __future__ import annotations

from rapid.errors import InvalidParameter


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidParameter(f"{option} must be whole numbers with commas between them, got {text!r}") from None


def whole_numbers(option: str, text: str) -> list[int]:
    return [whole_number(option, name) for name in names(text)]


def decimal(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidParameter(f"{option} must be numbers with commas between them, got {text!r}") from None
