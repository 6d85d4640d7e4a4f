"""Passages that no search found: to study what the quality of retrieval does to an answer.

The paper's ablation gives the drafter passages of another document; given places are the other end of the scale.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from importlib import resources

from rapid.errors import InvalidParameter
from rapid.types import Chunk, Document, ScoredChunk

# The novel that comes with the evaluation data; see data/ATTRIBUTION.md beside it.
_NOVEL = ("evals", "data", "persuasion.txt.gz")


def unrelated_text() -> Document:
    """The text that is unrelated to any document unless the user names another: Jane Austen's Persuasion."""
    packed = resources.files("rapid").joinpath(*_NOVEL).read_bytes()
    return Document(gzip.decompress(packed).decode(), "Persuasion (unrelated)")


def given_passages(documents: Sequence[Document], spans: Sequence[tuple[int, int, int]]) -> list[ScoredChunk]:
    """The passages at (document, start, end), in document order. Raises `InvalidParameter` for a place that is not
    in the documents."""
    found = []
    for number, start, end in sorted(spans):
        if number >= len(documents):
            raise InvalidParameter(
                f"oracle span {number}:{start}:{end} is of document {number}, and the last of {len(documents)} is "
                f"{len(documents) - 1}"
            )
        if end > len(documents[number].text):
            raise InvalidParameter(
                f"oracle span {start}:{end} ends beyond {documents[number].name}, which has "
                f"{len(documents[number].text)} characters"
            )
        found.append(ScoredChunk(Chunk(number, start, end, documents[number].text[start:end]), 1.0))
    return found
