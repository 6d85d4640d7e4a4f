"""The eight needle-in-a-haystack tasks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import Form
from rapid.evals.scorers import string_match_all
from rapid.evals.tasks.ruler.generate import Generator, Sample
from rapid.evals.tasks.ruler.words import (
    NOISE,
    essay,
    random_key,
    random_number,
    random_uuid,
    sentences,
)

Haystack = Literal["noise", "essay", "needles"]

# 40 depths, evenly spaced from 0 to 100 percent.
DEPTHS = [round(100 * i / 39) for i in range(40)]

_VALUES: dict[str, Callable[[random.Random], str]] = {
    "words": random_key,
    "numbers": random_number,
    "uuids": random_uuid,
}


@dataclass(frozen=True)
class _Needles:
    """A needle task: `keys` keys of `values` values each are hidden, `queries` of the keys are asked for."""

    haystack: Haystack
    key_kind: str
    value_kind: str
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def single(self) -> bool:
        return self.values * self.queries == 1

    def make(self, rng: random.Random, index: int, size: int) -> Sample:
        keys = _distinct(rng, _VALUES[self.key_kind], self.keys)
        values = {key: _distinct(rng, _VALUES[self.value_kind], self.values) for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        context = self._essay(rng, needles, size) if self.haystack == "essay" else self._lines(rng, needles, size, keys)
        asked = rng.sample(keys, self.queries)
        names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        kind = self.value_kind.removesuffix("s") if self.single else self.value_kind
        lead = "What is the" if self.single else "What are all the"
        question = f"{lead} special magic {kind} for {names} mentioned in the provided text?"
        answers = tuple(value for key in asked for value in values[key])
        return Sample(context, question, answers, values={"names": names, "kind": kind})

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value_kind} for {key} is: {value}."

    def _essay(self, rng: random.Random, needles: list[str], size: int) -> str:
        """`size` words of running text, the needles between its sentences at sampled depths."""
        text = sentences(essay(size))
        places = sorted(int(len(text) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            text.insert(place, needle)
        return " ".join(text)

    def _lines(self, rng: random.Random, needles: list[str], size: int, keys: list[str]) -> str:
        """`size` lines of noise, or of needles with other keys, the needles among them."""
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            key, value = _VALUES[self.key_kind], _VALUES[self.value_kind]
            lines = []
            while len(lines) < size:
                other = key(rng)
                if other not in keys:
                    lines.append(self._needle(other, value(rng)))
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


def _distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def _template(single: bool) -> PromptTemplate:
    some, verb = ("A", "is") if single else ("Some", "are")
    return PromptTemplate(
        before=f"{some} special magic $kind {verb} hidden within the following text. "
        "Make sure to memorize it. I will quiz you about the $kind afterwards.\n",
        after="\n$question",
        answer_prefix=f" The special magic $kind for $names mentioned in the provided text {verb}",
    )


_TASKS = {
    "niah_single_1": _Needles("noise", "words", "numbers"),
    "niah_single_2": _Needles("essay", "words", "numbers"),
    "niah_single_3": _Needles("essay", "words", "uuids"),
    "niah_multikey_1": _Needles("essay", "words", "numbers", keys=4),
    "niah_multikey_2": _Needles("needles", "words", "numbers"),
    "niah_multikey_3": _Needles("needles", "uuids", "uuids"),
    "niah_multivalue": _Needles("essay", "words", "numbers", values=4),
    "niah_multiquery": _Needles("essay", "words", "numbers", keys=4, queries=4),
}
NAMES = tuple(_TASKS)


def niah(name: str) -> Generator:
    """The generator of one of `NAMES`. Its size counts words of the essay, or lines."""
    task = _TASKS[name]
    return Generator(
        name=name,
        form=Form(_template(task.single), 128, string_match_all),
        metric="string_match_all",
        make=task.make,
        least=50 if task.haystack == "essay" else 4,
        most=10_000_000,
    )
