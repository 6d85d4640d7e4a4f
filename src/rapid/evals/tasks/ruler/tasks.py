"""RULER's thirteen tasks by name, and their averages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rapid.errors import InvalidParameter
from rapid.evals.schema import Task
from rapid.evals.tasks.ruler import niah, qa
from rapid.evals.tasks.ruler.extraction import common_words, frequent_words
from rapid.evals.tasks.ruler.generate import CountTokens, Generator, ruler_items
from rapid.evals.tasks.ruler.tracking import tracking

NAMES = (*niah.NAMES, "vt", "cwe", "fwe", *qa.NAMES)
NUM_SAMPLES = 500
SEED = 42


def ruler(
    name: str,
    *,
    length: int,
    count_tokens: CountTokens,
    num_samples: int = NUM_SAMPLES,
    seed: int = SEED,
    source: str | Path | None = None,
) -> Task:
    """One of the thirteen tasks at `length` tokens, answer included, counted by `count_tokens`.

    source  the question-answering tasks' data set file; the others need none.
    """
    return ruler_items(_generator(name, length, source), length, count_tokens, num_samples=num_samples, seed=seed)


def _generator(name: str, length: int, source: str | Path | None) -> Generator:
    if name in niah.NAMES:
        return niah.niah(name)
    if name in qa.NAMES:
        return qa.question_answering(name, source)
    if name == "vt":
        return tracking()
    if name == "cwe":
        return common_words(length)
    if name == "fwe":
        return frequent_words(length)
    raise InvalidParameter(f"RULER task must be one of {', '.join(NAMES)}, got {name!r}")


def weighted_average(scores: Mapping[int, float], order: Literal["inc", "dec"]) -> float:
    """RULER's wAvg: scores by length, weighted linearly, the longest most (`inc`) or least (`dec`)."""
    if order not in ("inc", "dec"):
        raise InvalidParameter(f"order must be inc or dec, got {order!r}")
    lengths = sorted(scores, reverse=order == "dec")
    if not lengths:
        raise InvalidParameter("scores must hold at least one length")
    total = sum(weight * scores[length] for weight, length in enumerate(lengths, start=1))
    return total / sum(range(1, len(lengths) + 1))
