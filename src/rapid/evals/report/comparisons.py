"""Variants against lc, rag and sd on the same items: gains beside the noise floor, rescued and broken items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rapid.evals.aggregate import ALL, Cell, Cells, Place, baseline, paired
from rapid.evals.configuration import Configuration
from rapid.evals.report.model import Section, Table, percent, signed
from rapid.evals.report.scores import is_lossless, place_name
from rapid.evals.stats import Changes, Interval, SignTest, changes, noise_floor, paired_bootstrap, sign_test

BASELINES = ("lc", "rag", "sd")

# What is not compared with a baseline: itself, and what the baseline has been compared with already.
_LOWER = {"lc": ("lc",), "rag": ("lc", "rag"), "sd": ("lc", "rag", "sd")}

# A summary's score has no point from which it is right.
GRADED = ("rougeLsum",)


@dataclass(frozen=True)
class Comparison:
    """A variant against a baseline in one place, on `n` shared items."""

    place: Place
    variant: Configuration
    against: Configuration
    gain: Interval
    test: SignTest
    changes: Changes
    floor: float | None

    @property
    def reading(self) -> str:
        """What the numbers allow to say."""
        if self.gain.low <= 0 <= self.gain.high:
            return "no difference shown"
        if self.floor is not None and abs(self.gain.value) <= self.floor:
            return "within the noise floor"
        return "better" if self.gain.value > 0 else "worse"


def compare(cells: Cells) -> list[Comparison]:
    """Every variant against every baseline that is not itself, where they share items."""
    found = []
    for place, variants in cells.items():
        if place.split != ALL:
            continue
        floor = place_noise_floor(variants)
        for variant, cell in variants.items():
            for method in BASELINES:
                other = baseline(variants, method, variant)
                if other is None or variant.method in _LOWER[method]:
                    continue
                scores, base = paired(cell, other[1])
                if scores:
                    gain = paired_bootstrap(scores, base)
                    test, changed = sign_test(scores, base), changes(scores, base)
                    found.append(Comparison(place, variant, other[0], gain, test, changed, floor))
    return found


def place_noise_floor(variants: Mapping[Configuration, Cell]) -> float | None:
    """The noise floor of a place: sd against lc, or None where one of them was not run."""
    sd = next((cell for variant, cell in variants.items() if variant.method == "sd"), None)
    lc = next((cell for variant, cell in variants.items() if variant.method == "lc"), None)
    if sd is None or lc is None:
        return None
    scores, base = paired(sd, lc)
    return noise_floor(scores, base) if scores else None


def comparison_section(comparisons: list[Comparison]) -> Section:
    """Gains with their intervals, the noise floor beside each one, and sign tests."""
    columns = ["method", "against", "n", "gain [95 %]", "noise floor ±", "wins / losses / ties", "sign test p", ""]
    tables = []
    for place in dict.fromkeys(comparison.place for comparison in comparisons):
        rows = [
            [
                c.variant.label,
                c.against.label,
                str(c.changes.n),
                f"{signed(c.gain.value)} [{signed(c.gain.low)}, {signed(c.gain.high)}]",
                percent(c.floor),
                f"{c.test.wins} / {c.test.losses} / {c.test.ties}",
                f"{c.test.p_value:.3f}",
                c.reading,
            ]
            for c in comparisons
            if c.place == place
        ]
        tables.append(Table(columns, rows, title=place_name(place)))
    text = [
        "Gains in points over the baseline on the same items, with 95 % paired bootstrap intervals and exact "
        "two-sided sign tests. Many comparisons are made: of twenty without any effect, one interval is expected "
        "to leave out zero.",
        "The noise floor is the larger end of the interval of sd against lc. Both follow the target's own "
        "distribution, so a gain that is no larger says nothing about the method.",
    ]
    return Section("Comparisons", text, tables)


def rescue_section(comparisons: list[Comparison]) -> Section:
    """Rescued and broken items against lc and rag (the paper's figure 2)."""
    shown = rescues(comparisons)
    columns = ["task", "method", "against", "n", "rescued %", "broken %"]
    rows = [
        [
            place_name(c.place),
            c.variant.label,
            c.against.label,
            str(c.changes.n),
            percent(c.changes.rescued / c.changes.n),
            percent(c.changes.broken / c.changes.n),
        ]
        for c in shown
    ]
    text = [
        "Rescued: wrong under the baseline, right under the method; broken: the reverse; in percent of all items. "
        "An item is right from a score of one half on. Summaries are left out."
    ]
    return Section("Rescued and broken items", text, [Table(columns, rows)] if rows else [])


def rescues(comparisons: list[Comparison]) -> list[Comparison]:
    """The comparisons with lc and rag for which right and wrong are defined."""
    return [c for c in comparisons if c.against.method in ("lc", "rag") and c.place.metric not in GRADED]


def floor_section(cells: Cells) -> Section:
    """What lossless speculation alone changes."""
    rows = []
    for place, variants in cells.items():
        if place.split != ALL:
            continue
        lossless = [v for v in variants if v.method not in ("lc", "rag") and is_lossless(v)]
        for variant in lossless:
            lc = baseline(variants, "lc", variant)
            if lc is None:
                continue
            scores, base = paired(variants[variant], lc[1])
            if not scores:
                continue
            gain = paired_bootstrap(scores, base)
            moved = sum(a != b for a, b in zip(scores, base, strict=True))
            interval = f"{signed(gain.value)} [{signed(gain.low)}, {signed(gain.high)}]"
            rows.append([place_name(place), variant.label, str(len(scores)), str(moved), interval])
    text = [
        "Lossless speculation has the target's own distribution: what differs from lc here is sampling, or rounding "
        "in another order of the same sums. No gain of this size counts."
    ]
    columns = ["task", "method", "n", "items scored differently", "difference from lc"]
    tables = [Table(columns, rows)] if rows else []
    return Section("Noise floor", text if rows else ["Not measured: needs both lc and sd."], tables)
