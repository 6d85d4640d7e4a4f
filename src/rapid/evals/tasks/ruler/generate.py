"""From a generator of one sample to a task of a given length."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rapid.errors import InvalidParameter
from rapid.evals.prompts import Prompt, PromptTemplate
from rapid.evals.schema import Form, Item, Task

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Sample:
    """One made question. `values` are what the template names besides the question."""

    context: str
    question: str
    answers: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Generator:
    """A RULER task. `make(rng, index, size)` gives sample `index` with `size` pieces of haystack.

    least, most  the sizes that make sense; the length of a sample grows with its size.
    """

    name: str
    form: Form
    metric: str
    make: Callable[[random.Random, int, int], Sample]
    least: int
    most: int
    most_samples: int | None = None


def ruler_items(generator: Generator, length: int, count_tokens: CountTokens, *, num_samples: int, seed: int) -> Task:
    """The task with `num_samples` items whose prompt and answer take at most `length` tokens.

    Sample i depends on the seed, the task, i and the size alone. The size is found by bisection on the first
    sample; a sample that turns out longer loses pieces until it fits.
    """
    if num_samples < 1:
        raise InvalidParameter(f"num_samples must be at least 1, got {num_samples}")
    if generator.most_samples is not None:
        num_samples = min(num_samples, generator.most_samples)

    def make(index: int, size: int) -> Sample:
        return generator.make(random.Random(f"{seed}:{generator.name}:{index}"), index, size)

    def fits(sample: Sample) -> bool:
        prompt = _prompt(generator.form.template, sample)
        tokens = count_tokens(prompt.text + prompt.answer_prefix)
        return tokens + generator.form.max_new_tokens <= length

    size = _largest(lambda size: fits(make(0, size)), generator.least, generator.most)
    if size is None:
        raise InvalidParameter(f"length {length} is too short for a sample of {generator.name}; use a longer one")
    step = max(1, size // 50)
    items = []
    for index in range(num_samples):
        used = size
        while not fits(sample := make(index, used)):
            if used == generator.least:
                raise InvalidParameter(f"length {length} is too short for {generator.name}; use a longer one")
            used = max(generator.least, used - step)
        items.append(_item(generator, sample, index, length, seed))
    return Task(f"ruler_{generator.name}", tuple(items), {generator.metric: generator.form}, splits=("length",))


def _largest(good: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest size in [least, most] that is good, where every smaller one is; None if there is none."""
    if not good(least):
        return None
    # Doubling first: large sizes, which are slow to make and to count, are tried only where they matter.
    high = least
    while high < most and good(min(most, 2 * high)):
        high = min(most, 2 * high)
    low, high = high, min(most, 2 * high)
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _prompt(template: PromptTemplate, sample: Sample) -> Prompt:
    return template.render(sample.context, {**sample.values, "question": sample.question})


def _item(generator: Generator, sample: Sample, index: int, length: int, seed: int) -> Item:
    return Item(
        id=f"{generator.name}-{length}-{seed}-{index}",
        context=sample.context,
        question=sample.question,
        answers=sample.answers,
        metric=generator.metric,
        source="RULER, generated",
        license="generated; Persuasion is in the public domain",
        fields={**sample.values, "length": str(length)},
    )
