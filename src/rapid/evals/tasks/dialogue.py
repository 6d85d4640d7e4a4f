"""Long dialogues (the paper's real-world test): a history of many mixed turns, of which the last is to be answered.

Made of questions about documents: in one turn somewhere in the history the user brings the document that the last
question is about; the other turns are passages of other documents with their questions and reference answers.
Answers are scored against their references, and can be rated by a judge (judge.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rapid.errors import DocumentError
from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import Form, Item, Task
from rapid.evals.scorers import qa_f1, rouge_l_sum
from rapid.evals.tasks.jsonl import jsonl_task, sample

TEMPLATE = PromptTemplate(
    before="Read the following text, the history of a conversation between a user and you.\n\n",
    after="\n\nThe user goes on: $question",
)
FORMS = {"qa_f1": Form(TEMPLATE, 256, qa_f1), "rougeLsum": Form(TEMPLATE, 256, rouge_l_sum)}
# The document of the last question leaves at least this share of a dialogue to other turns.
_SHARE = 0.75
_PASSAGE_WORDS = 120
_READ = "I have read it. What would you like to know?"


def dialogues(
    source: str | Path | None,
    *,
    length: int,
    count_tokens: Callable[[str], int],
    num_samples: int,
    seed: int,
) -> Task:
    """At most `num_samples` dialogues of up to `length` tokens from the items of a JSONL file, or of the sample."""
    task = jsonl_task(source) if source else sample()
    items = [item for item in task.items if item.metric in FORMS]
    tokens = {context: count_tokens(context) for context in dict.fromkeys(item.context for item in items)}
    last = [item for item in items if tokens[item.context] <= _SHARE * length]
    if not last:
        raise DocumentError(f"no document of {source or 'the sample'} fits a dialogue of {length} tokens; raise length")
    rng = random.Random(seed)
    rng.shuffle(last)
    made = [_dialogue(item, items, length - tokens[item.context], count_tokens, rng) for item in last[:num_samples]]
    return Task("dialogue", tuple(made), FORMS)


def _dialogue(
    item: Item, items: Sequence[Item], room: int, count_tokens: Callable[[str], int], rng: random.Random
) -> Item:
    """One dialogue: other turns until `room` tokens are used, the document's own at a random place among them."""
    earlier = [other for other in items if other.context == item.context and other.id != item.id]
    others = [other for other in items if other.context != item.context]
    if earlier:
        first = rng.choice(earlier)
        own = _turn(f"{item.context}\n\n{first.question}", first.answers[0])
    else:
        own = _turn(f"Please read this text.\n\n{item.context}", _READ)
    room -= count_tokens(own) - count_tokens(item.context)
    turns = []
    for other in rng.sample(others, len(others)):
        turn = _turn(f"{passage(other)}\n\n{other.question}", other.answers[0])
        room -= count_tokens(turn) + 2
        if room < 0:
            break
        turns.append(turn)
    turns.insert(rng.randint(0, len(turns)), own)
    return replace(item, id=f"dialogue-{item.id}", context="\n\n".join(turns), tokens=None)


def _turn(user: str, assistant: str) -> str:
    return f"User: {user}\n\nAssistant: {assistant}"


def passage(item: Item) -> str:
    """The stretch of the document, in whole lines, that shares most words with the item's question and answer."""
    wanted = _words(f"{item.question} {item.answers[0]}")
    stretches: list[str] = [""]
    for line in filter(str.strip, item.context.splitlines()):
        if stretches[-1] and len(f"{stretches[-1]} {line}".split()) > _PASSAGE_WORDS:
            stretches.append("")
        stretches[-1] = f"{stretches[-1]}\n{line}".strip()
    best = max(stretches, key=lambda text: len(_words(text) & wanted))
    words = best.split()
    return best if len(words) <= 2 * _PASSAGE_WORDS else " ".join(words[: 2 * _PASSAGE_WORDS])


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w{4,}", text.lower()))
