"""The rows of summary.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rapid.evals.aggregate import baseline, gather
from rapid.evals.results import Result
from rapid.evals.stats import bootstrap_mean


def summarise(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One row for each task, metric, split and variant.

    score, ci_low, ci_high  mean over items and its 95 % bootstrap interval, times 100.
    n                       items; `empty` of the answers had no text and count as wrong.
    acceptance_rate         accepted / drafted; null where nothing is drafted.
    decode_speedup          decoded tokens per second over those of lc on the same items; null without lc.
    prefill_s               mean seconds before the first token, retrieval included.
    """
    rows = []
    for place, variants in gather(results).items():
        for variant, cell in variants.items():
            interval = bootstrap_mean(list(cell.scores.values()))
            lc = baseline(variants, "lc", variant)
            settings = variant.as_dict()
            del settings["seed"]
            rows.append(
                {
                    "task": place.task,
                    "split": place.split,
                    **settings,
                    "metric": place.metric,
                    "score": 100 * interval.value,
                    "ci_low": 100 * interval.low,
                    "ci_high": 100 * interval.high,
                    "n": len(cell.scores),
                    "empty": cell.empty,
                    "acceptance_rate": cell.acceptance_rate,
                    "decode_speedup": cell.speedup(lc[1] if lc else None),
                    "prefill_s": cell.prefill_s,
                }
            )
    return rows
