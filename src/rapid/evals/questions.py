"""questions.jsonl of a run directory: what was asked, with its references, so that answers can be read and judged
without the task's own files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rapid.errors import DocumentError
from rapid.evals.files import write_bytes
from rapid.evals.readings import Reading

QUESTIONS = "questions.jsonl"


@dataclass(frozen=True)
class Asked:
    """A question and its references."""

    task: str
    item: str
    question: str
    answers: tuple[str, ...]


def write_questions(directory: Path, readings: Iterable[Reading]) -> None:
    """Add the questions of `readings` to those a former run of the directory asked."""
    known = {(asked.task, asked.item): asked for asked in read_questions(directory)}
    for question in (question for reading in readings for question in reading.questions):
        item = question.item
        known[question.task.name, item.id] = Asked(question.task.name, item.id, item.query, item.answers)
    lines = (json.dumps(vars(asked), ensure_ascii=False) for asked in known.values())
    write_bytes(directory / QUESTIONS, "".join(f"{line}\n" for line in lines).encode())


def read_questions(directory: Path) -> list[Asked]:
    """The questions of a run directory; none where it has no such file."""
    path = directory / QUESTIONS
    if not path.is_file():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        return [Asked(**{**row, "answers": tuple(row["answers"])}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DocumentError(f"{path} cannot be read ({error!r}); run the evaluation again to have it written") from None
