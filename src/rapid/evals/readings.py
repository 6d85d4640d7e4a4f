"""Which questions share one reading of a document: the same text behind the same opening words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rapid.errors import InvalidParameter
from rapid.evals.prompts import LONG_WORDS, RETRIEVED_WORDS, Prompt
from rapid.evals.schema import Form, Item, Task
from rapid.prompt import Template

# Decoding a token under a handful of configurations takes about as long as reading this many characters (measured
# with SmolLM2-135M on a CPU).
CHARACTERS_A_TOKEN = 400


@dataclass(frozen=True)
class Question:
    """An item of a task; `after` is the part of its prompt that follows the document."""

    task: Task
    item: Item
    after: str

    @property
    def form(self) -> Form:
        """How the item is asked."""
        return self.task.form(self.item)


@dataclass(frozen=True)
class Reading:
    """A document as the target reads it, with all the questions that are asked about it."""

    context: str
    template: Template
    questions: tuple[Question, ...]

    @property
    def cost(self) -> float:
        """What an answer takes, roughly: its share of the reading and its length, in characters of a document."""
        answers = sum(question.form.max_new_tokens for question in self.questions)
        return (len(self.context) + CHARACTERS_A_TOKEN * answers) / len(self.questions)


def split_prompt(prompt: Prompt) -> tuple[Template, str, str]:
    """A prompt as what a session takes: template, document, question; joined, they are the prompt.

    A prompt without a document is all document, and its question is empty.
    """
    template = Template(
        opening=prompt.before.replace(LONG_WORDS, "{what}") if prompt.context else "",
        middle="",
        whole=LONG_WORDS,
        retrieved=RETRIEVED_WORDS,
        system=prompt.system,
        answer_prefix=prompt.answer_prefix,
    )
    return (template, prompt.context, prompt.after) if prompt.context else (template, prompt.text, "")


def group(tasks: Iterable[Task], *, quickest_first: bool = False) -> list[Reading]:
    """All questions of the tasks by what is read for them, in the order of their first item, or the quickest first.

    Raises `InvalidParameter` for two tasks of one name: results are told apart by it.
    """
    found: dict[tuple[str, Template], list[Question]] = {}
    names: set[str] = set()
    for task in tasks:
        if task.name in names:
            raise InvalidParameter(f"two tasks are called {task.name}; rename one of the files")
        names.add(task.name)
        for item in task.items:
            template, context, after = split_prompt(task.prompt(item))
            found.setdefault((context, template), []).append(Question(task, item, after))
    readings = [Reading(context, template, tuple(questions)) for (context, template), questions in found.items()]
    return sorted(readings, key=lambda reading: reading.cost) if quickest_first else readings


def within(
    task: Task, count_tokens: Callable[[str], int], *, min_tokens: int | None = None, max_tokens: int | None = None
) -> Task:
    """The task with those of its items whose document has at least `min_tokens` and at most `max_tokens`."""
    if min_tokens is None and max_tokens is None:
        return task
    lengths = {context: count_tokens(context) for context in dict.fromkeys(item.context for item in task.items)}
    least, most = min_tokens or 0, max_tokens if max_tokens is not None else max(lengths.values(), default=0)
    return replace(task, items=tuple(item for item in task.items if least <= lengths[item.context] <= most))
