"""Real questions on real documents, at the context lengths of a benchmark.

A document within a tenth of the length is taken as it is. A shorter one is set between the beginning and the end of
other documents of the same tasks; a longer one, taken only where nothing else is left, loses its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapid.errors import InvalidParameter
from rapid.evals.schema import Item, Task
from rapid.evals.tasks.registry import load_task
from rapid.prompt import Prompter

_TOLERANCE = 0.1


@dataclass(frozen=True)
class BenchPrompt:
    """A question on a text of about `context` tokens. `metric` tells what kind of answer is wanted."""

    id: str
    context: int
    text: str
    question: str
    metric: str


def load_items(tasks: Sequence[str]) -> list[Item]:
    """All items of the tasks, by name or .jsonl file. Raises `InvalidParameter` or `DocumentError`."""
    found: list[Task] = [load_task(name) for name in tasks]
    return [item for task in found for item in task.items]


def choose(items: Sequence[Item], prompter: Prompter, context: int, count: int) -> list[BenchPrompt]:
    """`count` prompts of `context` tokens, kinds of answer in turn, then ordered so that those on one text stand
    together. Raises `InvalidParameter` where there are fewer
    items, or too little text to fill the context."""
    lengths = {text: prompter.count(text) for text in dict.fromkeys(item.context for item in items)}
    ranked = sorted(items, key=lambda item: _rank(lengths[item.context], context))
    chosen = _in_turn(ranked, lengths, context)[:count]
    if len(chosen) < count:
        raise InvalidParameter(f"the tasks hold {len(chosen)} questions, not {count}; ask for fewer, or give a --task")
    texts = list(dict.fromkeys(item.context for item in chosen))
    return [
        BenchPrompt(item.id, context, _fitted(item, lengths, prompter, context), item.query, item.metric)
        for item in sorted(chosen, key=lambda item: texts.index(item.context))
    ]


def _rank(length: int, context: int) -> tuple[int, int]:
    """Fitting documents in the order of the file, then shorter ones, the longest first, then longer ones."""
    if abs(length - context) <= _TOLERANCE * context:
        return 0, 0
    return (1, -length) if length < context else (2, length)


def _in_turn(ranked: Sequence[Item], lengths: dict[str, int], context: int) -> list[Item]:
    """The metrics take turns within each class of fit, so that few prompts still are of several kinds."""
    queues: dict[tuple[int, str], int] = {}
    keyed = []
    for item in ranked:
        fit = _rank(lengths[item.context], context)[0]
        turn = queues[fit, item.metric] = queues.get((fit, item.metric), 0) + 1
        keyed.append(((fit, turn), item))
    return [item for _, item in sorted(keyed, key=lambda pair: pair[0])]


def _fitted(item: Item, lengths: dict[str, int], prompter: Prompter, context: int) -> str:
    length = lengths[item.context]
    fit, _ = _rank(length, context)
    if fit == 0:
        return item.context
    if fit == 2:
        start, end = prompter.cut_middle(item.context, context)
        return item.context[:start] + item.context[end:]
    texts = list(lengths)
    own = texts.index(item.context)
    filler, missing = "", context - length
    for text in [*texts[own + 1 :], *texts[:own]]:
        filler += ("\n\n" if filler else "") + text
        if prompter.count(filler) >= missing:
            start, end = prompter.cut_middle(filler, missing)
            return f"{filler[:start]}\n\n{item.context}\n\n{filler[end:]}"
    raise InvalidParameter(f"the tasks hold too little text for a context of {context}; give a longer --task")
