"""Question answering over many documents: SQuAD v2 (qa_1) and HotpotQA (qa_2), from their own files."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid.errors import DocumentError
from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import Form
from rapid.evals.scorers import string_match_part
from rapid.evals.tasks.ruler.generate import Generator, Sample

NAMES = ("qa_1", "qa_2")

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
TEMPLATE = PromptTemplate(
    before=f"{_INSTRUCTION}\n\nThe following are given documents.\n\n",
    after=f"\n\n{_INSTRUCTION}\n\nQuestion: $question",
    answer_prefix=" Answer:",
)


@dataclass(frozen=True)
class _Question:
    """A question, its references, the documents that answer it, and the ones to add first (by number)."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Pool:
    documents: tuple[str, ...]
    questions: tuple[_Question, ...]

    def make(self, rng: random.Random, index: int, size: int) -> Sample:
        """`size` documents: the gold ones, then related ones, then any others, shuffled."""
        question = self.questions[index]
        chosen = list(question.gold)
        missing = max(0, size - len(chosen))
        chosen += rng.sample(question.related, min(missing, len(question.related)))
        taken = set(question.gold) | set(question.related)
        others = [number for number in range(len(self.documents)) if number not in taken]
        chosen += rng.sample(others, min(len(others), max(0, size - len(chosen))))
        rng.shuffle(chosen)
        context = "\n\n".join(
            f"Document {place}:\n{self.documents[number]}" for place, number in enumerate(chosen, start=1)
        )
        return Sample(context, question.text, question.answers)


def _numbers(documents: list[str]) -> dict[str, int]:
    return {document: number for number, document in enumerate(sorted(set(documents)))}


def _squad(data: Any) -> _Pool:
    articles = [[p["context"] for p in article["paragraphs"]] for article in data["data"]]
    numbers = _numbers([paragraph for article in articles for paragraph in article])
    questions = []
    for article, paragraphs in zip(data["data"], articles, strict=True):
        of_article = {numbers[paragraph] for paragraph in paragraphs}
        for paragraph in article["paragraphs"]:
            gold = numbers[paragraph["context"]]
            questions += [
                _Question(
                    qa["question"],
                    tuple(answer["text"] for answer in qa["answers"]),
                    (gold,),
                    tuple(sorted(of_article - {gold})),
                )
                for qa in paragraph["qas"]
                if not qa.get("is_impossible", False)
            ]
    return _Pool(tuple(numbers), tuple(questions))


def _hotpot(data: Any) -> _Pool:
    contexts = [[f"{title}\n{''.join(lines)}" for title, lines in row["context"]] for row in data]
    numbers = _numbers([document for context in contexts for document in context])
    questions = tuple(
        _Question(row["question"], (row["answer"],), tuple(dict.fromkeys(numbers[d] for d in context)))
        for row, context in zip(data, contexts, strict=True)
    )
    return _Pool(tuple(numbers), questions)


def question_answering(name: str, source: str | Path | None) -> Generator:
    """The generator of `qa_1` or `qa_2`. Its size counts documents; `source` is the data set's JSON file."""
    read, original = (
        (_squad, "SQuAD's dev-v2.0.json")
        if name == "qa_1"
        else (
            _hotpot,
            "HotpotQA's hotpot_dev_distractor_v1.json",
        )
    )
    if source is None:
        raise DocumentError(f"ruler_{name} needs a local copy of {original}; give its path as the task's source")
    try:
        pool = read(json.loads(Path(source).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DocumentError(f"{source} cannot be read as {original}: {error}") from None
    except (KeyError, TypeError) as error:
        raise DocumentError(f"{source} is not in the format of {original}: {error!r}") from None
    return Generator(
        name=name,
        form=Form(TEMPLATE, 32, string_match_part),
        metric="string_match_part",
        make=pool.make,
        least=1,
        most=len(pool.documents),
        most_samples=len(pool.questions),
    )
