"""The methods of the benchmarks, by name."""

from __future__ import annotations

from typing import Any

from rapid.errors import InvalidParameter
from rapid.params import Speculation

OUR_METHODS = ("lc", "lookup", "sd", "rapid", "auto")
METHODS = ("hf-plain", "hf-lookup", "hf-assisted", *OUR_METHODS)


def speculation(method: str, num_draft_tokens: int | None, eta: float) -> Speculation:
    """The setting behind one of `OUR_METHODS`. None for the draft length leaves lookup and sd to the governor.

    auto is lossless rapid with drafter and draft length chosen by the governor. Raises `InvalidParameter`.
    """
    if method not in OUR_METHODS:
        raise InvalidParameter(f"method must be one of {', '.join(OUR_METHODS)}, got {method!r}")
    fixed: Any = "auto" if num_draft_tokens is None else num_draft_tokens
    if method == "auto":
        return Speculation("rapid", eta=0.0, law="exact", num_draft_tokens="auto")
    if method == "rapid":
        return Speculation("rapid", eta=eta, num_draft_tokens=fixed)
    if method == "lc":
        return Speculation("lc")
    return Speculation("lookup" if method == "lookup" else "sd", num_draft_tokens=fixed)
