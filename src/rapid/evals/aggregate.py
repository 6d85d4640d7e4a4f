"""Results gathered into cells: one variant on one metric of one task, all of its items or one split of them.

A variant is a configuration without its seed. An item's score is its mean over the seeds it was run with, so
that n counts items and pairs are of items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rapid.evals.configuration import Configuration
from rapid.evals.results import Result

ALL = "all"
# In tables before all other methods.
BASELINES = ("lc", "rag", "sd")


class Place(NamedTuple):
    """What a cell's scores are of. `split` is "all" or NAME=VALUE."""

    task: str
    metric: str
    split: str = ALL


@dataclass(frozen=True)
class Cell:
    """The results of one variant in one place; never empty."""

    results: Sequence[Result]

    @property
    def scores(self) -> dict[tuple[str, str], float]:
        """Score by (task, item), 0 to 1, in the order of the results."""
        found: dict[tuple[str, str], list[float]] = {}
        for result in self.results:
            found.setdefault((result.task, result.item), []).append(result.score)
        return {item: sum(scores) / len(scores) for item, scores in found.items()}

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted over all items; None where nothing was drafted."""
        drafted = sum(result.drafted for result in self.results)
        return sum(result.accepted for result in self.results) / drafted if drafted else None

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second over all items; None where no time was measured."""
        seconds = sum(result.timing.decode_s for result in self.results)
        return sum(result.completion_tokens for result in self.results) / seconds if seconds else None

    @property
    def prefill_s(self) -> float:
        """Mean seconds before the first token."""
        return sum(result.timing.until_decoding_s for result in self.results) / len(self.results)

    @property
    def empty(self) -> int:
        """Answers without text: counted as wrong."""
        return sum(not result.prediction.strip() for result in self.results)

    def speedup(self, baseline: Cell | None) -> float | None:
        """Decoding throughput over the baseline's, on the items that both have."""
        if baseline is None:
            return None
        shared = self.scores.keys() & baseline.scores.keys()
        mine, other = (
            Cell([result for result in cell.results if (result.task, result.item) in shared]).tokens_per_s
            for cell in (self, baseline)
        )
        return mine / other if mine is not None and other else None


Cells = Mapping[Place, Mapping[Configuration, Cell]]


def gather(results: Iterable[Result]) -> Cells:
    """All cells: places in the order of their first result, variants by method, law and numbers, so that a run that
    was extended reads like one that was not."""
    found: dict[Place, dict[Configuration, list[Result]]] = {}
    for result in results:
        variant = replace(result.configuration, seed=None)
        splits = [ALL, *(f"{name}={value}" for name, value in result.splits.items())]
        for split in splits:
            place = Place(result.task, result.metric, split)
            found.setdefault(place, {}).setdefault(variant, []).append(result)
    return {
        place: {variant: Cell(variants[variant]) for variant in sorted(variants, key=_rank)}
        for place, variants in found.items()
    }


def _rank(variant: Configuration) -> tuple[int, str, str, float, float, int, int, str]:
    return (
        BASELINES.index(variant.method) if variant.method in BASELINES else len(BASELINES),
        variant.method,
        variant.law or "",
        variant.eta or 0.0,
        variant.alpha or 0.0,
        variant.num_draft_tokens or 0,
        variant.context_budget or 0,
        variant.retrieval,
    )


def baseline(
    variants: Mapping[Configuration, Cell], method: str, like: Configuration
) -> tuple[Configuration, Cell] | None:
    """The variant of `method` to compare `like` with: with its retrieval settings where there is one."""
    of_method = [(variant, cell) for variant, cell in variants.items() if variant.method == method]
    for variant, cell in of_method:
        if (variant.context_budget, variant.retrieval) == (like.context_budget, like.retrieval):
            return variant, cell
    return of_method[0] if of_method else None


def paired(first: Cell, second: Cell) -> tuple[list[float], list[float]]:
    """Scores of the items that both have, in one order."""
    mine, other = first.scores, second.scores
    shared = [item for item in mine if item in other]
    return [mine[item] for item in shared], [other[item] for item in shared]
