"""The plot of a decode report: speed by method and context, and where the time of a token goes."""

from __future__ import annotations

from io import BytesIO
from statistics import median
from typing import Any

from rapid.evals.optional import require

Report = dict[str, Any]

# Okabe and Ito's palette: distinguishable with any colour vision.
_PARTS = (("draft_s", "draft", "#E69F00"), ("verify_s", "verify", "#0072B2"), ("other_s", "other", "#999999"))
_OURS, _PEER = "#0072B2", "#999999"


def plot_decode(report: Report) -> bytes:
    """A PNG with two rows of panels, one column per context."""
    contexts = list(dict.fromkeys(row["context"] for row in report["rows"]))
    methods = list(dict.fromkeys(report["conditions"]["methods"]))
    # Without pyplot there is no process-wide state and no display to look for.
    figure = require("matplotlib.figure", "matplotlib").Figure(
        figsize=(max(6.0, (0.9 + 0.62 * len(methods)) * len(contexts)), 7.0), layout="constrained"
    )
    axes = figure.subplots(2, len(contexts), squeeze=False, sharey="row")
    for column, context in enumerate(contexts):
        _speeds(axes[0][column], report, context, methods)
        _times(axes[1][column], report, context, methods)
    axes[0][0].set_ylabel("tokens per second")
    axes[1][0].set_ylabel("milliseconds per token")
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_PARTS), frameon=False)
    conditions = report["conditions"]
    figure.suptitle(
        f"{conditions['model']['name']}, {conditions['hardware']}, threads: {conditions['threads']}, "
        f"prompts: {conditions['prompts']}".replace("$", r"\$"),
        fontsize=10,
    )
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _speeds(axis: Any, report: Report, context: int, methods: list[str]) -> None:
    """The median of each method as a bar, each answer as a dot."""
    for place, method in enumerate(methods):
        speeds = [row["decode_tokens_per_s"] for row in _rows(report, context, method)]
        axis.bar(place, median(speeds), color=_PEER if method.startswith("hf-") else _OURS, alpha=0.75)
        axis.plot([place] * len(speeds), speeds, ".", color="black", markersize=4)
    axis.set_title(f"{context:,} tokens", fontsize=10)
    _name(axis, methods)


def _times(axis: Any, report: Report, context: int, methods: list[str]) -> None:
    """Milliseconds of an emitted token, stacked by what they went into, over all answers."""
    for place, method in enumerate(methods):
        rows, bottom = _rows(report, context, method), 0.0
        tokens = sum(row["completion_tokens"] for row in rows)
        for part, label, colour in _PARTS:
            height = 1e3 * sum(row[part] for row in rows) / tokens
            axis.bar(place, height, bottom=bottom, color=colour, label=label if place == 0 else None)
            bottom += height
    _name(axis, methods)


def _rows(report: Report, context: int, method: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["context"] == context and row["method"] == method]


def _name(axis: Any, methods: list[str]) -> None:
    axis.set_xticks(range(len(methods)), methods, rotation=35, ha="right", rotation_mode="anchor", fontsize=9)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
