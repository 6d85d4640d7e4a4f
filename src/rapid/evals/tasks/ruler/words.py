"""Word lists and the haystack."""

from __future__ import annotations

import gzip
import random
import re
import uuid
from functools import cache
from importlib.resources import files
from itertools import cycle, islice, pairwise

from rapid.evals.optional import require

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# A sentence ends at . ! or ?, with closing quotes or brackets, before a space and a capital or opening quote.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]”’]*\s+(?=[\"'(\[“‘]?[A-Z])")


@cache
def _category(category: str) -> tuple[str, ...]:
    wonderwords = require("wonderwords", "wonderwords")
    words: list[str] = wonderwords.RandomWord().filter(include_categories=[category])
    return tuple(sorted(set(words)))


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, sorted, without doubles."""
    return tuple(sorted({word for category in ("noun", "adjective", "verb") for word in _category(category)}))


def random_key(rng: random.Random) -> str:
    """An adjective-noun pair."""
    return f"{rng.choice(_category('adjective'))}-{rng.choice(_category('noun'))}"


def random_number(rng: random.Random) -> str:
    """A number of seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def random_uuid(rng: random.Random) -> str:
    """A version 4 UUID from the given generator."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@cache
def _persuasion() -> tuple[str, ...]:
    data = (files("rapid.evals") / "data" / "persuasion.txt.gz").read_bytes()
    return tuple(gzip.decompress(data).decode("utf-8").split())


def essay(num_words: int) -> str:
    """So many words of Jane Austen's Persuasion (1818; 108 thousand tokens), from the start, again and again."""
    return " ".join(islice(cycle(_persuasion()), num_words))


def sentences(text: str) -> list[str]:
    """The sentences of running text."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return [text[start:end].strip() for start, end in pairwise([0, *ends, len(text)])]
