"""Chooses eta, law, alpha and gamma of rapid on some documents and reports on the others.

A document is in the tuning part by the hash of its text, so all of its questions are, in every file and run that
has it. Nothing is chosen by a held-out item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rapid.errors import InvalidParameter
from rapid.evals.aggregate import ALL, Cell, Cells, gather, paired
from rapid.evals.configuration import Configuration, grid
from rapid.evals.files import write_json
from rapid.evals.readings import Reading
from rapid.evals.results import Result
from rapid.evals.runner import RunOptions, run
from rapid.evals.stats import paired_bootstrap, sign_test
from rapid.evals.store import RunStore
from rapid.evals.summary import summarise
from rapid.params import Speculation

if TYPE_CHECKING:
    from rapid.engine import Engine

TUNING = "tuning.json"
FRACTION = 0.5
_BASELINES = ("lc", "rag", "sd")


@dataclass(frozen=True)
class Split:
    """Readings to choose by, and readings to report on."""

    tuning: list[Reading]
    held_out: list[Reading]


@dataclass(frozen=True)
class Trial:
    """A candidate on the tuning part: its score (0 to 1) is the mean over tasks and metrics of the mean item's."""

    configuration: Configuration
    score: float
    acceptance_rate: float


def split(readings: Sequence[Reading], fraction: float = FRACTION) -> Split:
    """Part the readings by their documents. Raises `InvalidParameter` where a part would be empty."""
    if not 0 < fraction < 1:
        raise InvalidParameter(f"the tuning fraction must be between 0 and 1, got {fraction}")
    parts = Split([], [])
    for reading in readings:
        (parts.tuning if _place(reading.context) < fraction else parts.held_out).append(reading)
    if not parts.tuning or not parts.held_out:
        raise InvalidParameter(f"{len(readings)} documents are too few to choose on some and report on others")
    return parts


def _place(context: str) -> float:
    """Where in [0, 1) the document's hash falls."""
    return int.from_bytes(hashlib.sha256(context.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def rank(results: Sequence[Result], candidates: Sequence[Configuration]) -> list[Trial]:
    """The candidates, best first: by score, then by acceptance, then in the given order.

    Decoding speed is not asked: it is the clock's, and the choice should be the same on every machine.
    """
    cells = gather(results)
    trials = []
    for candidate in dict.fromkeys(replace(c, seed=None) for c in candidates):
        found = [
            variants[candidate] for place, variants in cells.items() if place.split == ALL and candidate in variants
        ]
        if found:
            score = sum(_mean(cell) for cell in found) / len(found)
            everything = Cell([result for cell in found for result in cell.results])
            trials.append(Trial(candidate, score, everything.acceptance_rate or 0.0))
    return sorted(trials, key=lambda trial: (-trial.score, -trial.acceptance_rate))


def tune(
    engine: Engine,
    store: RunStore,
    readings: Sequence[Reading],
    candidates: Sequence[Configuration],
    default: Configuration,
    options: RunOptions,
    *,
    fraction: float = FRACTION,
) -> dict[str, Any] | None:
    """Run the candidates on the tuning part; the best, the default and the baselines on the other.

    Returns what is also written to tuning.json, or None where the time limit came first: the next call goes on.
    """
    parts = split(readings, fraction)
    if run(engine, store, parts.tuning, candidates, options):
        return None
    trials = rank(_of(store.results, parts.tuning), candidates)
    chosen = trials[0].configuration
    seeds = list(dict.fromkeys(c.seed for c in candidates))
    compared = [
        replace(configuration, seed=seed)
        for configuration in dict.fromkeys([*map(_baseline, _BASELINES), replace(default, seed=None), chosen])
        for seed in seeds
    ]
    if run(engine, store, parts.held_out, compared, options):
        return None
    wanted = {replace(configuration, seed=None) for configuration in compared}
    held_out = [
        result for result in _of(store.results, parts.held_out) if replace(result.configuration, seed=None) in wanted
    ]
    report = {
        "objective": "mean over tasks and metrics of the mean score",
        "documents": {"tuning": len(parts.tuning), "held_out": len(parts.held_out)},
        "candidates": [
            {**trial.configuration.as_dict(), "score": 100 * trial.score, "acceptance_rate": trial.acceptance_rate}
            for trial in trials
        ],
        "chosen": chosen.as_dict(),
        "default": replace(default, seed=None).as_dict(),
        "held_out": summarise(held_out),
        "gains": gains(gather(held_out), chosen),
    }
    write_json(store.directory / TUNING, report)
    return report


def gains(cells: Cells, chosen: Configuration) -> list[dict[str, Any]]:
    """What the choice gains over everything else that was run on the same items, in points, with intervals."""
    rows = []
    for place, variants in cells.items():
        for other, cell in variants.items():
            if place.split != ALL or other == chosen or chosen not in variants:
                continue
            mine, theirs = paired(variants[chosen], cell)
            gain, test = paired_bootstrap(mine, theirs), sign_test(mine, theirs)
            rows.append(
                {
                    "task": place.task,
                    "metric": place.metric,
                    "against": other.label,
                    "n": len(mine),
                    "gain": 100 * gain.value,
                    "ci_low": 100 * gain.low,
                    "ci_high": 100 * gain.high,
                    "sign_test_p": test.p_value,
                }
            )
    return rows


def default_configuration(engine: Engine) -> Configuration:
    """What `rapid ask` does with this engine's models when nothing is asked for."""
    resolved = engine.resolve(Speculation())
    return grid(["rapid"], etas=[resolved.rule.eta], laws=[Speculation.law])[0]


def _baseline(method: str) -> Configuration:
    return replace(grid([method])[0], seed=None)


def _mean(cell: Cell) -> float:
    return sum(cell.scores.values()) / len(cell.scores)


def _of(results: Sequence[Result], readings: Sequence[Reading]) -> list[Result]:
    """The results of the questions of some readings."""
    wanted = {(question.task.name, question.item.id) for reading in readings for question in reading.questions}
    return [result for result in results if (result.task, result.item) in wanted]
