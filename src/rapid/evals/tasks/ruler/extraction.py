"""Word counting: the common words of a list (cwe), the frequent words of a coded text (fwe)."""

from __future__ import annotations

import math
import random
import string

from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import Form
from rapid.evals.scorers import string_match_all
from rapid.evals.tasks.ruler.generate import Generator, Sample
from rapid.evals.tasks.ruler.words import all_words

NUM_COMMON = 10
CWE_TEMPLATE = PromptTemplate(
    before="${example}Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    after="\nQuestion: $question",
    answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
)
CWE_QUESTION = "What are the 10 most common words in the above list?"

ZETA_2 = math.pi**2 / 6  # the exponent of the word frequencies is 2
CODE_LENGTH = 6
FWE_TEMPLATE = PromptTemplate(
    before="Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ",
    after="\nQuestion: $question",
    answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
)
FWE_QUESTION = (
    "Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _word_list(rng: random.Random, size: int, common: int, uncommon: int) -> tuple[str, list[str]]:
    """A numbered list of `size` different words: ten of them `common` times, the others `uncommon` times."""
    words = rng.sample(all_words(), size)
    listed = words[:NUM_COMMON] * common + words[NUM_COMMON:] * uncommon
    rng.shuffle(listed)
    return _numbered(listed), words[:NUM_COMMON]


def common_words(length: int) -> Generator:
    """The generator of `cwe`, with one worked example. Its size counts different words, of which there are
    about 8,600: lists end near 110 thousand tokens, whatever the length."""
    short = length < 4096
    example_size, example_times, times = (20, (3, 1), (6, 1)) if short else (40, (10, 3), (30, 3))

    def make(rng: random.Random, index: int, size: int) -> Sample:
        shown, shown_answers = _word_list(rng, example_size, *example_times)
        prompt = CWE_TEMPLATE.render(shown, {"example": "", "question": CWE_QUESTION})
        example = f"{prompt.text}{prompt.answer_prefix}{_numbered(shown_answers)}\n"
        context, answers = _word_list(rng, size, *times)
        return Sample(context, CWE_QUESTION, tuple(answers), {"example": example})

    form = Form(CWE_TEMPLATE, 120, string_match_all)
    return Generator("cwe", form, "string_match_all", make, least=NUM_COMMON + 1, most=len(all_words()))


def frequent_words(length: int) -> Generator:
    """The generator of `fwe`: word k of `length` // 50 occurs in proportion to k to the power -2. The most
    frequent one is dots, not to be counted. Its size is the number of words before rounding down."""
    vocabulary = max(5, length // 50)

    def make(rng: random.Random, index: int, size: int) -> Sample:
        found: dict[str, None] = {}
        while len(found) < vocabulary:
            found["".join(rng.choices(string.ascii_lowercase, k=CODE_LENGTH))] = None
        words = ["...", *list(found)[1:]]
        coded = [word for k, word in enumerate(words, start=1) for _ in range(int(size / (k * k * ZETA_2)))]
        rng.shuffle(coded)
        return Sample(" ".join(coded), FWE_QUESTION, tuple(words[1:4]))

    form = Form(FWE_TEMPLATE, 50, string_match_all)
    # From 53 words on rank 4, the last to be found, occurs more often than rank 5.
    return Generator("fwe", form, "string_match_all", make, least=53, most=10_000_000)
