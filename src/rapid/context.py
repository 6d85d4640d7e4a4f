"""What the target reads of the documents: all of them joined, with the middle cut out where they do not fit.

Floor 1: plain text and offsets, no tokenizer and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rapid.types import Document, ScoredChunk

SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Piece:
    """A stretch of one document: `documents[document].text[start:end]`."""

    document: int
    start: int
    end: int


def join(documents: Sequence[Document]) -> str:
    """The text of all documents, in order, a blank line between two."""
    return SEPARATOR.join(d.text for d in documents)


def visible_pieces(documents: Sequence[Document], cut: tuple[int, int] | None) -> list[Piece]:
    """The stretches of the documents that are left when characters `cut` = [a, b) of `join(documents)` go."""
    pieces = []
    offset = 0
    for number, document in enumerate(documents):
        size = len(document.text)
        spans = [(0, size)]
        if cut:
            a, b = (min(max(edge - offset, 0), size) for edge in cut)
            spans = [(0, a), (b, size)]
        pieces += [Piece(number, start, end) for start, end in spans if start < end]
        offset += size + len(SEPARATOR)
    return pieces


def as_documents(documents: Sequence[Document], pieces: Sequence[Piece]) -> list[Document]:
    """Each piece as a document of its own, to be indexed."""
    return [Document(documents[p.document].text[p.start : p.end], documents[p.document].name) for p in pieces]


def in_documents(found: ScoredChunk, pieces: Sequence[Piece]) -> ScoredChunk:
    """A passage found in a piece, with its offsets in the document the piece comes from."""
    piece = pieces[found.chunk.document]
    chunk = replace(
        found.chunk,
        document=piece.document,
        start=found.chunk.start + piece.start,
        end=found.chunk.end + piece.start,
    )
    return replace(found, chunk=chunk)
