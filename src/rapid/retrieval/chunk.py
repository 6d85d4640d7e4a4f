"""A document cut into passages that fit a number of tokens, at the strongest boundaries that allow it.

semchunk does the cutting (paragraph, line, sentence, clause, word, character, recursively). It knows no
Chinese or Japanese punctuation, so that is made visible to it as whitespace in a copy of the text; offsets
are mapped back. Passages never overlap; only whitespace between them is dropped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from typing import cast

from rapid.types import Chunk, Document

TokenCounter = Callable[[str], int]

# A sentence end with the brackets that close on it, or a clause end.
_CJK_BOUNDARY = re.compile("(?P<sentence>[。！？｡…]+[”’」』）】》]*)|[；，、：]")
# Whitespace that no text holds; semchunk splits at it, and takes the longer run for the stronger boundary.
_MARKS = "\x1f\x1e\x1d\x1c\u2028\u2029"
# No tokenizer in use packs more than this many characters into one token of ordinary text.
_CHARS_PER_TOKEN = 32


def chunk_document(document: Document, number: int, count_tokens: TokenCounter, max_tokens: int = 512) -> list[Chunk]:
    """Passages of `document`, which is number `number` of its request, in order; none for a blank text.

    `document.text[c.start:c.end] == c.text`, `count_tokens(c.text) <= max_tokens`, and each character that is
    not whitespace is in exactly one passage. Only a single character that is longer than `max_tokens` by
    itself exceeds the limit. `count_tokens` need not be additive.
    """
    text = document.text
    return [Chunk(number, start, end, text[start:end]) for start, end in _spans(text, count_tokens, max_tokens)]


def _spans(text: str, count_tokens: TokenCounter, max_tokens: int) -> list[tuple[int, int]]:
    """Offsets of the passages of `text`."""
    from semchunk.semchunk import chunk

    if not text or text.isspace():
        return []
    marked, mark, inserted = _mark_boundaries(text)
    count = _bounded(count_tokens, mark, max_tokens)
    if count(marked) <= max_tokens:
        return [(0, len(text))]
    try:
        # memoize would keep every text ever counted alive in a global table
        found = chunk(marked, max_tokens, count, memoize=False, offsets=True)
    except RecursionError:
        # Thousands of different whitespace runs, or one character beyond the limit: halves have fewer.
        middle = len(text) // 2
        if middle == 0:
            return [(0, len(text))]
        left = _spans(text[:middle], count_tokens, max_tokens)
        right = _spans(text[middle:], count_tokens, max_tokens)
        return left + [(middle + start, middle + end) for start, end in right]
    spans = cast(list[tuple[int, int]], found[1])
    return [(start - bisect_left(inserted, start), end - bisect_left(inserted, end)) for start, end in spans]


def _mark_boundaries(text: str) -> tuple[str, str, list[int]]:
    """A copy of `text` with a mark after each CJK clause and two after each sentence, the mark, and the
    offsets of all marks in the copy. The text itself, where there is nothing to mark."""
    mark = next((m for m in _MARKS if m not in text), "")
    pieces: list[str] = []
    inserted: list[int] = []
    position = length = 0
    for match in _CJK_BOUNDARY.finditer(text) if mark else ():
        size = 2 if match["sentence"] else 1
        pieces += [text[position : match.end()], mark * size]
        length += match.end() - position
        inserted += range(length, length + size)
        length += size
        position = match.end()
    if not inserted:
        return text, "", []
    return "".join([*pieces, text[position:]]), mark, inserted


def _bounded(count_tokens: TokenCounter, mark: str, max_tokens: int) -> TokenCounter:
    """`count_tokens` without the marks, and without reading all of a text that is far beyond the limit:
    recursion would otherwise tokenize the same megabytes once a level."""
    longest = 4 * max_tokens * _CHARS_PER_TOKEN

    def count(text: str) -> int:
        text = text.replace(mark, "") if mark else text
        if len(text) > 2 * longest:
            tokens = count_tokens(text[:longest])
            if tokens > 2 * max_tokens:
                return tokens * len(text) // longest
        return count_tokens(text)

    return count
