"""Scores in the paper's layout: one table of all tasks, one of splits for each task that has them, RULER by
length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rapid.evals.aggregate import ALL, Cell, Cells, Place, baseline, gather
from rapid.evals.configuration import Configuration
from rapid.evals.report.model import NONE, Section, Table, number, percent
from rapid.evals.results import Result
from rapid.evals.stats import bootstrap_mean
from rapid.evals.tasks.ruler.tasks import weighted_average

METRIC_NAMES = {
    "qa_f1": "F1",
    "mc_accuracy": "accuracy",
    "rougeLsum": "ROUGE-L-Sum",
    "string_match_part": "match",
    "string_match_all": "match",
}
# The paper's order of columns; other values follow in the order of their first item.
_SPLIT_ORDER = ("easy", "hard", "short", "medium", "long")
_INFINITEBENCH = ("infinitebench_en_qa", "infinitebench_en_mc", "infinitebench_en_sum")


def place_name(place: Place) -> str:
    """Task and metric, as a column is headed."""
    return f"{place.task} {METRIC_NAMES.get(place.metric, place.metric)}"


def with_interval(cell: Cell | None) -> str:
    """A cell's score with its interval."""
    if cell is None:
        return NONE
    interval = bootstrap_mean(list(cell.scores.values()))
    return f"{percent(interval.value)} [{percent(interval.low)}, {percent(interval.high)}]"


def is_lossless(variant: Configuration) -> bool:
    """True where the answer follows a model's own distribution on the prompt it was given."""
    return variant.method != "rapid" or variant.law == "exact" or variant.eta == 0


def main_section(results: Sequence[Result], cells: Cells) -> Section:
    """Every variant on every task, with its speed and acceptance over all of them."""
    places = [place for place in cells if place.split == ALL]
    overall = _over_all_tasks(results)
    averaged = all(any(place.task == task for place in places) for task in _INFINITEBENCH)
    columns = ["method", "law of the output", *(f"{place_name(p)} (n={_items(cells[p])})" for p in places)]
    columns += ["∞Bench average"] if averaged else []
    rows = []
    for variant, cell in overall.items():
        row = [variant.label, "target's own" if is_lossless(variant) else "lossy"]
        row += [with_interval(cells[place].get(variant)) for place in places]
        if averaged:
            row.append(_infinitebench_average(cells, variant))
        lc = baseline(overall, "lc", variant)
        speedup = cell.speedup(lc[1] if lc else None)
        row += [number(cell.prefill_s), number(speedup), number(cell.acceptance_rate), str(cell.empty)]
        rows.append(row)
    columns += ["prefill s", "speed-up", "acceptance", "empty answers"]
    text = [
        "Scores times 100 with 95 % bootstrap intervals over items. Prefill: mean seconds before the first token, "
        "retrieval included. Speed-up: decoded tokens per second over those of lc on the same items, prefill "
        "excluded. Acceptance: accepted / drafted tokens. Empty answers count as wrong. "
        "The rag answers follow the target's distribution on the retrieved prompt, not on the long one."
    ]
    return Section("Scores", text, [Table(columns, rows)])


def split_sections(cells: Cells) -> list[Section]:
    """A table of each task's splits, RULER's lengths apart."""
    tables = []
    for place, variants in cells.items():
        splits = sorted((p for p in cells if p[:2] == place[:2] and p.split != ALL), key=_split_rank)
        if place.split != ALL or not splits or place.task.startswith("ruler_"):
            continue
        columns = ["method", f"overall (n={_items(variants)})"]
        columns += [f"{p.split.partition('=')[2]} (n={_items(cells[p])})" for p in splits]
        rows = [
            [variant.label, with_interval(cell), *(with_interval(cells[p].get(variant)) for p in splits)]
            for variant, cell in variants.items()
        ]
        tables.append(Table(columns, rows, title=place_name(place)))
    return [Section("Scores by split", tables=tables)] if tables else []


def ruler_sections(cells: Cells) -> list[Section]:
    """RULER: the mean over its tasks at each length, and the two weighted averages over lengths."""
    means: dict[Configuration, dict[int, list[float]]] = {}
    tasks = set()
    for place, variants in cells.items():
        name, _, value = place.split.partition("=")
        if place.task.startswith("ruler_") and name == "length" and value.isdecimal():
            tasks.add(place.task)
            for variant, cell in variants.items():
                mean = sum(cell.scores.values()) / len(cell.scores)
                means.setdefault(variant, {}).setdefault(int(value), []).append(mean)
    if not means:
        return []
    lengths = sorted({length for of_variant in means.values() for length in of_variant})
    rows = []
    for variant, of_variant in means.items():
        score = {length: sum(found) / len(found) for length, found in of_variant.items()}
        row = [variant.label, *(percent(score.get(length)) for length in lengths)]
        rows.append([*row, percent(weighted_average(score, "inc")), percent(weighted_average(score, "dec"))])
    text = [f"Mean over the {len(tasks)} of RULER's 13 tasks that were run, by length in tokens."]
    columns = ["method", *(str(length) for length in lengths), "wAvg (inc)", "wAvg (dec)"]
    return [Section("RULER", text, [Table(columns, rows)])]


def _split_rank(place: Place) -> int:
    value = place.split.partition("=")[2]
    return _SPLIT_ORDER.index(value) if value in _SPLIT_ORDER else len(_SPLIT_ORDER)


def _items(variants: Mapping[Configuration, Cell]) -> int:
    return len({item for cell in variants.values() for item in cell.scores})


def _over_all_tasks(results: Sequence[Result]) -> Mapping[Configuration, Cell]:
    """Cells of all results of a variant, for counts and seconds."""
    everything: dict[Configuration, list[Result]] = {}
    for variants in (v for place, v in gather(results).items() if place.split == ALL):
        for variant, cell in variants.items():
            everything.setdefault(variant, []).extend(cell.results)
    return {variant: Cell(of_variant) for variant, of_variant in everything.items()}


def _infinitebench_average(cells: Cells, variant: Configuration) -> str:
    scores = [
        cell.scores
        for task in _INFINITEBENCH
        for place, variants in cells.items()
        if place.task == task and place.split == ALL and (cell := variants.get(variant)) is not None
    ]
    if len(scores) < len(_INFINITEBENCH):
        return NONE
    return percent(sum(sum(s.values()) / len(s) for s in scores) / len(scores))
