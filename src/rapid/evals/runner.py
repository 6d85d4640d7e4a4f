"""Runs what is missing of a plan: each document read once, every answer on disk before the next is begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rapid.errors import RapidError
from rapid.evals.asking import AskSettings, OpenReading
from rapid.evals.configuration import Configuration, Key
from rapid.evals.readings import Question, Reading
from rapid.evals.results import Result
from rapid.evals.store import RunStore
from rapid.evals.summary import summarise

if TYPE_CHECKING:
    from rapid.engine import Engine


@dataclass(frozen=True)
class RunOptions:
    """How to run. `deadline`: by time.monotonic(), no answer is begun after it; None for no limit."""

    ask: AskSettings = field(default_factory=AskSettings)
    deadline: float | None = None
    on_progress: Callable[[Progress], None] | None = None


@dataclass(frozen=True)
class Progress:
    """After one more result: how many of the plan are done, what it took, and what is left by this run's pace."""

    done: int
    total: int
    result: Result
    seconds: float
    left_s: float


def plan(readings: Sequence[Reading], configurations: Sequence[Configuration]) -> list[Key]:
    """Every question under every configuration that applies to it, document by document."""
    return [key for key, _, _ in _steps(readings, configurations)]


def run(
    engine: Engine,
    store: RunStore,
    readings: Sequence[Reading],
    configurations: Sequence[Configuration],
    options: RunOptions,
) -> int:
    """Answer what the store does not have yet, then write its summary; how much of the plan is left.

    What a time limit leaves is done by the next run into the same store.
    """
    steps = list(_steps(readings, configurations))
    keys = [key for key, _, _ in steps]
    missing = set(store.missing(keys))
    todo = [step for step in steps if step[0] in missing]
    work, worked = sum(reading.cost for _, reading, _ in todo), 0.0
    start = time.monotonic()
    opened: OpenReading | None = None
    for number, (key, reading, question) in enumerate(todo, start=1):
        began = time.monotonic()
        if options.deadline is not None and began >= options.deadline:
            break
        with _named(key):
            if opened is None or opened.reading is not reading:
                opened = None  # two documents' caches need not fit into memory
                opened = OpenReading(engine, reading, options.ask)
            result = opened.answer(question, key.configuration)
        store.append(result)
        worked += reading.cost
        if options.on_progress:
            now = time.monotonic()
            left_s = max(0.0, (now - start) * (work - worked) / worked)
            options.on_progress(Progress(len(keys) - len(todo) + number, len(keys), result, now - began, left_s))
    store.finish(keys, summarise(store.results))
    return len(store.missing(keys))


def _steps(
    readings: Sequence[Reading], configurations: Sequence[Configuration]
) -> Iterator[tuple[Key, Reading, Question]]:
    for reading in readings:
        for question in reading.questions:
            for configuration in configurations:
                # Without a document there is nothing to retrieve or to draft from: the target answers alone.
                if question.form.uses_context or configuration.method == "lc":
                    yield Key(question.task.name, question.item.id, configuration), reading, question


@contextmanager
def _named(key: Key) -> Iterator[None]:
    """Errors say which item they are about."""
    try:
        yield
    except RapidError as error:
        raise type(error)(f"task {key.task}, item {key.item}: {error}") from error
