"""What is asked: items, the forms they are asked in, and tasks.

item   one question about one document, with its references.
form   how items of one metric are asked and scored: template, answer length, scorer.
task   items with their forms, and the fields by which scores are split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from rapid.errors import InvalidParameter
from rapid.evals.prompts import Prompt, PromptTemplate

LETTERS = "ABCD"


@dataclass(frozen=True)
class Item:
    """One question. `answers` are alternative references (all wanted together under string_match_all).

    choices        the four options in order A to D, or None.
    answer_letter  the right one's letter, or None.
    tokens         length of the context as its file states it, or None.
    fields         further strings: what scores are split by, and what a template needs.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    choices: tuple[str, str, str, str] | None = None
    answer_letter: str | None = None
    source: str = ""
    license: str = ""
    tokens: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise InvalidParameter("an item has an empty id; give each item its own")
        if not self.answers:
            raise InvalidParameter(f"item {self.id} has no answers; give at least one reference")
        if (self.choices is None) != (self.answer_letter is None):
            raise InvalidParameter(f"item {self.id} needs both choices and answer_letter, or neither")
        if self.answer_letter is not None and self.answer_letter not in tuple(LETTERS):
            raise InvalidParameter(f"item {self.id}: answer_letter must be A, B, C or D, got {self.answer_letter!r}")

    @property
    def values(self) -> dict[str, str]:
        """What a template may name: the question, the choices, the fields."""
        choices = {f"choice_{LETTERS[i].lower()}": text for i, text in enumerate(self.choices or ())}
        return {**self.fields, **choices, "question": self.question}

    @property
    def query(self) -> str:
        """What to retrieve by: the question, with its choices where there are any (paper, section 3.1)."""
        return "\n".join((self.question, *(self.choices or ())))


Scorer = Callable[[str, Item], float]  # (prediction, item) -> score between 0 and 1


@dataclass(frozen=True)
class SecondStage:
    """The second prompt of a two-stage form: it has no document, and is given the first answer as `$cot`."""

    template: PromptTemplate
    max_new_tokens: int


@dataclass(frozen=True)
class Form:
    """How items are asked. Without `uses_context` the document is left out (LongBench v2, no context)."""

    template: PromptTemplate
    max_new_tokens: int
    scorer: Scorer
    second_stage: SecondStage | None = None
    uses_context: bool = True


@dataclass(frozen=True)
class Task:
    """Items, the form of each metric among them, and the item fields by which scores are split."""

    name: str
    items: tuple[Item, ...]
    forms: Mapping[str, Form]
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for item in self.items:
            if item.id in seen:
                raise InvalidParameter(f"task {self.name} has two items with id {item.id}; ids must differ")
            seen.add(item.id)
            if item.metric not in self.forms:
                raise InvalidParameter(
                    f"task {self.name}, item {item.id}: metric must be one of {', '.join(self.forms)}, "
                    f"got {item.metric!r}"
                )

    def form(self, item: Item) -> Form:
        """How this item is asked."""
        return self.forms[item.metric]

    def prompt(self, item: Item, context: str | None = None) -> Prompt:
        """The long prompt; `context` replaces the item's own (after a cut)."""
        form = self.form(item)
        text = "" if not form.uses_context else item.context if context is None else context
        return form.template.render(text, item.values)

    def retrieved_prompt(self, item: Item, passages: str) -> Prompt:
        """The drafter's prompt: the same template around the retrieved passages."""
        form = self.form(item)
        return form.template.render(passages if form.uses_context else "", item.values, retrieved=True)

    def answer_prompt(self, item: Item, first_answer: str) -> Prompt:
        """The second stage's prompt, which holds the first answer instead of the document."""
        stage = self.form(item).second_stage
        if stage is None:
            raise InvalidParameter(f"task {self.name} asks in one stage; it has no second prompt")
        return stage.template.render("", {**item.values, "cot": first_answer.strip()})

    def score(self, item: Item, prediction: str) -> float:
        """The prediction's score, 0 to 1. An empty prediction is wrong, never skipped."""
        return self.form(item).scorer(prediction, item) if prediction.strip() else 0.0

    def split_values(self, item: Item) -> dict[str, str]:
        """The item's place in each split of the task."""
        return {name: item.fields[name] for name in self.splits if name in item.fields}

    def limited(self, limit: int | None) -> Task:
        """The task with its first `limit` items."""
        if limit is None:
            return self
        if limit < 1:
            raise InvalidParameter(f"limit must be at least 1, got {limit}")
        return Task(self.name, self.items[:limit], self.forms, self.splits)

    def data_hash(self) -> str:
        """SHA-256 of the items, in order: equal hashes mean equal data."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(json.dumps(asdict(item), sort_keys=True, ensure_ascii=False).encode())
            digest.update(b"\n")
        return digest.hexdigest()
