"""The report's plots, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from textwrap import fill
from typing import Any

from rapid.evals.aggregate import ALL, Cells
from rapid.evals.optional import require
from rapid.evals.report.comparisons import Comparison
from rapid.evals.report.model import Figure
from rapid.evals.report.scores import place_name
from rapid.evals.report.sensitivity import EtaPoint, LengthPoint
from rapid.evals.stats import bootstrap_mean

# Okabe and Ito's palette: distinguishable with any colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_COLUMNS = 3  # panels in a row
_GREY = "#999999"


def score_figure(cells: Cells) -> Figure:
    """Scores with intervals, one panel for each task and metric."""
    places = [place for place in cells if place.split == ALL]
    rows = max(len(cells[place]) for place in places)
    figure, axes = _panels(len(places), height=max(2.2, 1.0 + 0.3 * rows))
    for place, axis in zip(places, axes, strict=False):
        for height, (variant, cell) in enumerate(reversed(list(cells[place].items()))):
            interval = bootstrap_mean(list(cell.scores.values()))
            low, high = interval.value - interval.low, interval.high - interval.value
            colour = _COLOURS[0] if variant.method == "rapid" else _GREY
            axis.errorbar(
                100 * interval.value,
                height,
                xerr=[[100 * low], [100 * high]],
                fmt="o",
                color=colour,
                ecolor=colour,
                capsize=3,
            )
        axis.set_yticks(range(len(cells[place])), [variant.label for variant in reversed(list(cells[place]))])
        _title(axis, place_name(place))
        axis.set_xlabel("score")
        axis.grid(axis="x", alpha=0.3)
        axis.margins(y=0.08)
    return _finish(figure, "scores", "Scores times 100 with 95 % bootstrap intervals over items; rapid in blue.")


def rescue_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Broken items to the left, rescued ones to the right (the paper's figure 2)."""
    groups = list(dict.fromkeys((c.place, c.against) for c in comparisons))
    rows = max(sum((c.place, c.against) == group for c in comparisons) for group in groups)
    figure, axes = _panels(len(groups), height=max(2.4, 1.1 + 0.3 * rows))
    for group, axis in zip(groups, axes, strict=False):
        here = [c for c in comparisons if (c.place, c.against) == group][::-1]
        rescued = [100 * c.changes.rescued / c.changes.n for c in here]
        broken = [100 * c.changes.broken / c.changes.n for c in here]
        axis.barh(range(len(here)), rescued, color=_COLOURS[2], label="rescued")
        axis.barh(range(len(here)), [-value for value in broken], color=_COLOURS[1], label="broken")
        axis.axvline(0, color="black", linewidth=0.8)
        widest = max(*rescued, *broken, 1.0)
        for height, (right, left) in enumerate(zip(rescued, broken, strict=True)):
            axis.text(right + 0.03 * widest, height, f"{right:.1f}", va="center", fontsize=8)
            axis.text(-left - 0.03 * widest, height, f"{left:.1f}", va="center", ha="right", fontsize=8)
        axis.set_xlim(-1.3 * widest, 1.3 * widest)
        axis.set_xticks(axis.get_xticks(), [f"{abs(tick):g}" for tick in axis.get_xticks()])
        axis.set_xlim(-1.3 * widest, 1.3 * widest)
        axis.set_yticks(range(len(here)), [c.variant.label for c in here])
        place, against = group
        _title(axis, f"{place_name(place)}, against {against.label}")
        axis.set_xlabel("% of items")
    _legend(figure, axes[0])
    caption = "Items that a method rescues (right) and breaks (left), in percent of all, against lc and rag."
    return _finish(figure, "rescued-broken", caption)


def eta_figure(points: Sequence[EtaPoint]) -> Figure:
    """Gain over lc, acceptance and speed-up by eta: a row of panels for each task and metric."""
    places = list(dict.fromkeys(point.place for point in points))
    curves = list(dict.fromkeys(point.curve for point in points))
    figure, axes = _panels(3 * len(places), height=2.8)
    for row, place in enumerate(places):
        gain, acceptance, speedup = axes[3 * row : 3 * row + 3]
        here = [point for point in points if point.place == place]
        for curve in dict.fromkeys(point.curve for point in here):
            of_curve = [point for point in here if point.curve == curve]
            style = _style(curves.index(curve), curve)
            etas = [point.eta for point in of_curve]
            values = [100 * point.gain.value for point in of_curve]
            low = [100 * (point.gain.value - point.gain.low) for point in of_curve]
            high = [100 * (point.gain.high - point.gain.value) for point in of_curve]
            gain.errorbar(etas, values, yerr=[low, high], capsize=3, **style)
            _line(acceptance, etas, [point.acceptance for point in of_curve], style)
            _line(speedup, etas, [point.speedup for point in of_curve], style)
        if here[0].floor is not None:
            gain.axhspan(-100 * here[0].floor, 100 * here[0].floor, color=_GREY, alpha=0.25, label="noise floor")
        gain.axhline(0, color="black", linewidth=0.8)
        speedup.axhline(1, color="black", linewidth=0.8)
        _title(gain, place_name(place))
        for axis, name in ((gain, "gain over lc, points"), (acceptance, "acceptance"), (speedup, "speed-up")):
            axis.set_ylabel(name)
            axis.set_xlabel("η (0 is sd)")
            axis.grid(alpha=0.3)
    _legend(figure, axes[0])
    caption = "Gain over lc with 95 % intervals, acceptance and decoding speed-up by η; the band is the noise floor."
    return _finish(figure, "eta", caption)


def length_figure(points: Sequence[LengthPoint]) -> Figure:
    """Speed-up and acceptance by the length of the target's prompt (the paper's figure 3)."""
    figure, (speedup, acceptance) = _panels(2, height=3.4)
    lengths = sorted({point.length for point in points})
    for number, variant in enumerate(dict.fromkeys(point.variant for point in points)):
        of_variant = [point for point in points if point.variant == variant]
        places = [lengths.index(point.length) for point in of_variant]
        style = _style(number, variant.label)
        _line(speedup, places, [point.speedup for point in of_variant], style)
        _line(acceptance, places, [point.acceptance for point in of_variant], style)
    speedup.axhline(1, color="black", linewidth=0.8)
    for axis, name in ((speedup, "decoding speed-up over lc"), (acceptance, "acceptance")):
        axis.set_ylabel(name)
        axis.set_xlabel("prompt tokens, at most")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axis.grid(alpha=0.3)
    _legend(figure, speedup)
    caption = "Decoding speed-up over lc and acceptance by tokens of the target's prompt."
    return _finish(figure, "context-length", caption)


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    """A figure with `count` axes, unused ones removed. `height` is one panel's, in inches."""
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    # Without pyplot there is no process-wide state and no display to look for.
    figure = require("matplotlib.figure", "matplotlib").Figure(
        figsize=(max(4.2 * columns, 5.5), height * rows), layout="constrained"
    )
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def _title(axis: Any, text: str) -> None:
    # A $ would start a formula.
    axis.set_title(fill(text.replace("$", r"\$"), 36), fontsize=10)


def _style(number: int, label: str) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": ("-", "--", ":")[number // len(_COLOURS) % 3],
        "label": label,
    }


def _line(axis: Any, x: Sequence[float], y: Sequence[float | None], style: dict[str, Any]) -> None:
    known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    if known:
        axis.plot(*zip(*known, strict=True), **style)


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def _finish(figure: Any, name: str, caption: str) -> Figure:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return Figure(name, buffer.getvalue(), caption)
