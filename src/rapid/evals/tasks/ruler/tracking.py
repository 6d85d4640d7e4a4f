"""Variable tracking: a chain of assignments scattered over noise."""

from __future__ import annotations

import random
import string

from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import Form
from rapid.evals.scorers import string_match_all
from rapid.evals.tasks.ruler.generate import Generator, Sample
from rapid.evals.tasks.ruler.words import NOISE

NUM_HOPS = 4
EXAMPLE_LINES = 5

_BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    f"{NUM_HOPS + 1} variables are assigned the value $value, they are: "
)
TEMPLATE = PromptTemplate(before="${example}" + _BEFORE, after="\n$question", answer_prefix=_PREFIX)


def _chain(rng: random.Random, size: int, name_length: int) -> Sample:
    """`size` lines of noise with five assignments, in order, between them. The answer is all five names."""
    names: dict[str, None] = {}
    while len(names) < NUM_HOPS + 1:
        names["".join(rng.choices(string.ascii_uppercase, k=name_length))] = None
    value = str(rng.randint(10_000, 99_999))
    assigned = [value, *(f"VAR {name}" for name in names)][:-1]
    chain = [f"VAR {name} = {of}" for name, of in zip(names, assigned, strict=True)]
    lines = [NOISE] * size
    places = sorted(rng.sample(range(size), len(chain)))
    for place, assignment in reversed(list(zip(places, chain, strict=True))):
        lines.insert(place, assignment)
    question = f"Question: Find all variables that are assigned the value {value} in the text above."
    return Sample("\n".join(lines), question, tuple(names), values={"value": value, "example": ""})


def _make(rng: random.Random, index: int, size: int) -> Sample:
    shown = _chain(rng, EXAMPLE_LINES, name_length=3)
    prompt = TEMPLATE.render(shown.context, {**shown.values, "question": shown.question})
    example = f"{prompt.text}{prompt.answer_prefix}{' '.join(shown.answers)}\n\n"
    asked = _chain(rng, size, name_length=5)
    return Sample(asked.context, asked.question, asked.answers, {**asked.values, "example": example})


def tracking() -> Generator:
    """The generator of `vt`: one chain, four hops, one worked example. Its size counts lines of noise."""
    form = Form(TEMPLATE, 30, string_match_all)
    return Generator("vt", form, "string_match_all", _make, least=NUM_HOPS + 1, most=1_000_000)
