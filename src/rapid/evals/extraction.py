"""The letter of a LongBench v2 reply."""

from __future__ import annotations

import re
from typing import Literal, get_args

from rapid.errors import InvalidParameter

Extraction = Literal["strict", "lenient"]
EXTRACTIONS: tuple[str, ...] = get_args(Extraction)

_LEAD = {"strict": "The correct answer is ", "lenient": "correct answer is "}


def extract_letter(prediction: str, mode: Extraction = "strict") -> str | None:
    """The answered letter, A to D, or None.

    `strict` is the benchmark's own rule: asterisks deleted, then "The correct answer is (X)", then the same
    without parentheses; case counts. `lenient` is the RAPID code's, which drops the leading "The ".
    """
    if mode not in EXTRACTIONS:
        raise InvalidParameter(f"extraction must be one of {', '.join(EXTRACTIONS)}, got {mode!r}")
    text = prediction.replace("*", "")
    for pattern in (r"\(([A-D])\)", r"([A-D])"):
        match = re.search(_LEAD[mode] + pattern, text)
        if match:
            return match.group(1)
    return None
