"""How the variants depend on eta (the paper's table 3) and on the lengths of the context and of what is retrieved
(its figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapid.evals.aggregate import ALL, Cell, Cells, Place, baseline, gather, paired
from rapid.evals.configuration import Configuration
from rapid.evals.report.comparisons import place_noise_floor
from rapid.evals.report.model import NONE, Section, Table, number, signed
from rapid.evals.report.scores import place_name
from rapid.evals.results import Result
from rapid.evals.stats import Interval, paired_bootstrap


@dataclass(frozen=True)
class EtaPoint:
    """One eta of one curve: the gain over lc, the speed-up and the acceptance."""

    place: Place
    curve: str
    eta: float
    gain: Interval
    speedup: float | None
    acceptance: float | None
    floor: float | None


@dataclass(frozen=True)
class LengthPoint:
    """One bin of prompt lengths of one variant; `length` is the bin's upper end, a power of two tokens."""

    variant: Configuration
    length: int
    items: int
    speedup: float | None
    acceptance: float | None


def eta_points(cells: Cells) -> list[EtaPoint]:
    """The points of every curve that has more than one eta; sd is the curve's eta 0."""
    points = []
    for place, variants in cells.items():
        if place.split != ALL:
            continue
        floor = place_noise_floor(variants)
        for curve in dict.fromkeys(_curve(v) for v in variants if v.method == "rapid"):
            members = [v for v in variants if v.method == "rapid" and _curve(v) == curve]
            sd = baseline(variants, "sd", members[0])
            members = sorted([*members, *([sd[0]] if sd else [])], key=lambda v: v.eta or 0.0)
            found = [
                EtaPoint(place, curve, v.eta, gain, cell.speedup(lc[1]), cell.acceptance_rate, floor)
                for v in members
                if v.eta is not None
                and (lc := baseline(variants, "lc", v)) is not None
                and (gain := _gain(cell := variants[v], lc[1])) is not None
            ]
            points += found if len({point.eta for point in found}) > 1 else []
    return points


def eta_section(points: list[EtaPoint]) -> Section:
    """Gain over lc and speed-up for each eta, in the layout of the paper's table 3."""
    tables = []
    for place in dict.fromkeys(point.place for point in points):
        here = [point for point in points if point.place == place]
        etas = sorted({point.eta for point in here})
        rows = []
        for curve in dict.fromkeys(point.curve for point in here):
            at = {point.eta: point for point in here if point.curve == curve}
            rows.append([curve, *(_eta_cell(at.get(eta)) for eta in etas)])
        tables.append(Table(["law", *(f"η={eta:g}" for eta in etas)], rows, title=place_name(place)))
    text = [
        "Gain over lc in points with its 95 % interval / decoding speed-up / acceptance. η = 0 is sd. "
        "An η picked from this table is picked on these items: report it on others."
    ]
    return Section("Sensitivity to η", text, tables)


def length_points(results: Sequence[Result]) -> list[LengthPoint]:
    """Speed-up and acceptance of every drafting variant by the length of the target's prompt."""
    bins: dict[int, list[Result]] = {}
    for result in results:
        if result.configuration.method != "rag":  # its prompt is the retrieved one
            bins.setdefault(1 << max(0, result.prompt_tokens - 1).bit_length(), []).append(result)
    points = []
    for length in sorted(bins):
        everything: dict[Configuration, list[Result]] = {}
        for place, variants in gather(bins[length]).items():
            for variant, cell in variants.items() if place.split == ALL else ():
                everything.setdefault(variant, []).extend(cell.results)
        cells = {variant: Cell(of_variant) for variant, of_variant in everything.items()}
        for variant, cell in cells.items():
            lc = baseline(cells, "lc", variant)
            if variant.method != "lc" and lc is not None:
                speedup = cell.speedup(lc[1])
                points.append(LengthPoint(variant, length, len(cell.scores), speedup, cell.acceptance_rate))
    return points


def length_section(points: list[LengthPoint]) -> Section:
    """Speed-up / acceptance for each length of context, as the paper's figure 3 shows them."""
    lengths = sorted({point.length for point in points})
    rows = []
    for variant in dict.fromkeys(point.variant for point in points):
        at = {point.length: point for point in points if point.variant == variant}
        rows.append([variant.label, *(_length_cell(at.get(length)) for length in lengths)])
    text = [
        "Decoding speed-up over lc / acceptance (items), by tokens of the target's prompt, up to the length named. "
        "A method named with a number of retrieved tokens has its own row for each such budget."
    ]
    tables = [Table(["method", *(f"≤ {length}" for length in lengths)], rows)] if rows else []
    return Section("Sensitivity to context and retrieval length", text, tables)


def _curve(variant: Configuration) -> str:
    """A label without its eta."""
    return " ".join(part for part in variant.label.split() if not part.startswith("η="))


def _gain(cell: Cell, lc: Cell) -> Interval | None:
    scores, base = paired(cell, lc)
    return paired_bootstrap(scores, base) if scores else None


def _eta_cell(point: EtaPoint | None) -> str:
    if point is None:
        return NONE
    gain = f"{signed(point.gain.value)} [{signed(point.gain.low)}, {signed(point.gain.high)}]"
    return f"{gain} / {number(point.speedup)} / {number(point.acceptance)}"


def _length_cell(point: LengthPoint | None) -> str:
    if point is None:
        return NONE
    return f"{number(point.speedup)} / {number(point.acceptance)} ({point.items})"
