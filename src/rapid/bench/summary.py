"""Rows to medians and ratios.

Ratios are paired: a method's speed over lc's in the same repeat of the same prompt, the median over repeats standing
for the prompt. Intervals are over prompts (bootstrap of the mean logarithm, 95 %).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from rapid.evals.stats import bootstrap_mean

Row = dict[str, Any]
_BASELINES = ("lc", "hf-plain")


def summarise(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """`summary`: one entry per method and context. `groups`: per method over all contexts, and by metric, where
    `context` or `metric` is None for all of them."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    groups = [
        {"metric": metric, **entry}
        for context in ([None, *contexts] if len(contexts) > 1 else contexts)
        for metric in [None, *metrics]
        for entry in _entries(rows, context, metric)
    ]
    return {"summary": [entry for context in contexts for entry in _entries(rows, context, None)], "groups": groups}


def _entries(rows: Sequence[Row], context: int | None, metric: str | None) -> list[Row]:
    methods = list(dict.fromkeys(row["method"] for row in rows))  # in the order of the first round, for all contexts
    here = [r for r in rows if (context is None or r["context"] == context) and (metric in (None, r["metric"]))]
    return [_entry(here, method, context) for method in methods if any(row["method"] == method for row in here)]


def _entry(rows: Sequence[Row], method: str, context: int | None) -> Row:
    own = [row for row in rows if row["method"] == method]
    to_lc, to_peer = (_ratios(rows, method, baseline) for baseline in _BASELINES)
    return {
        "method": method,
        "context": context,
        "median_tokens_per_s": median(row["decode_tokens_per_s"] for row in own),
        "ratio_to_lc": median(to_lc) if to_lc else None,
        "ratio_to_hf_plain": median(to_peer) if to_peer else None,
        "min_ratio_to_lc": min(to_lc, default=None),
        "geomean_ratio_to_lc": _geomean(to_lc),
        "geomean_ratio_to_lc_interval": _interval(to_lc),
        "geomean_ratio_to_hf_plain": _geomean(to_peer),
        "geomean_ratio_to_hf_plain_interval": _interval(to_peer),
        "prompts": len({(row["context"], row["prompt"]) for row in own}),
        "equal_to_plain": sum(row["equal_to_plain"] for row in own) / len(own),
        "acceptance_rate": _share(own, "accepted", "drafted"),
        "draft_share": _share(own, "draft_s", "decode_s"),
        "verify_share": _share(own, "verify_s", "decode_s"),
        "other_share": _share(own, "other_s", "decode_s"),
    }


def _ratios(rows: Sequence[Row], method: str, baseline: str) -> list[float]:
    """One ratio of speeds for each prompt that both answered."""
    speeds = {(r["method"], r["context"], r["prompt"], r["repeat"]): r["decode_tokens_per_s"] for r in rows}
    by_prompt: dict[tuple[int, str], list[float]] = {}
    for (name, context, prompt, repeat), speed in speeds.items():
        other = speeds.get((baseline, context, prompt, repeat))
        if name == method and other is not None:
            by_prompt.setdefault((context, prompt), []).append(speed / other)
    return [median(ratios) for ratios in by_prompt.values()]


def _geomean(ratios: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _interval(ratios: Sequence[float]) -> list[float] | None:
    if len(ratios) < 2:
        return None
    found = bootstrap_mean([math.log(ratio) for ratio in ratios])
    return [math.exp(found.low), math.exp(found.high)]


def _share(rows: Sequence[Row], part: str, whole: str) -> float | None:
    total = sum(row[whole] for row in rows)
    return sum(row[part] for row in rows) / total if total else None
