"""What the target reads of the documents, and where its parts stand in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.context import SEPARATOR, Piece, as_documents, in_documents, join, visible_pieces
from rapid.types import Chunk, Document, ScoredChunk

DOCUMENTS = [Document("abcdef", "first"), Document("ghi", "second"), Document("jklmno", "third")]


def test_documents_are_joined_by_a_blank_line():
    assert join(DOCUMENTS) == "abcdef\n\nghi\n\njklmno"
    assert join(DOCUMENTS[:1]) == "abcdef"


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        (None, [(0, 0, 6), (1, 0, 3), (2, 0, 6)]),
        ((6, 6), [(0, 0, 6), (1, 0, 3), (2, 0, 6)]),
        ((2, 4), [(0, 0, 2), (0, 4, 6), (1, 0, 3), (2, 0, 6)]),
        ((3, 15), [(0, 0, 3), (2, 2, 6)]),  # the second goes wholly
        ((6, 13), [(0, 0, 6), (2, 0, 6)]),
        ((7, 9), [(0, 0, 6), (1, 1, 3), (2, 0, 6)]),  # begins inside a separator
        ((0, 19), []),
    ],
)
def test_a_cut_leaves_pieces(cut, pieces):
    assert visible_pieces(DOCUMENTS, cut) == [Piece(*piece) for piece in pieces]


def test_a_passage_of_a_piece_stands_in_its_document():
    pieces = visible_pieces(DOCUMENTS, (3, 14))
    documents = as_documents(DOCUMENTS, pieces)
    assert documents == [Document("abc", "first"), Document("klmno", "third")]
    found = in_documents(ScoredChunk(Chunk(1, 1, 3, "lm"), 0.5), pieces)
    assert found == ScoredChunk(Chunk(2, 2, 4, "lm"), 0.5)
    assert DOCUMENTS[2].text[2:4] == "lm"


@given(st.lists(st.text("ab🦉\n", max_size=6), min_size=1, max_size=4), st.data())
def test_pieces_are_what_a_cut_leaves_of_the_text(texts, data):
    documents = [Document(text) for text in texts]
    whole = join(documents)
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    pieces = visible_pieces(documents, (first, last))
    left = whole[:first] + whole[last:]
    seen = "".join(document.text for document in as_documents(documents, pieces))
    # The text that is left is the pieces and what is left of separators between them.
    assert len(left) - len(seen) <= len(SEPARATOR) * (len(documents) - 1)
    position = 0
    for document in as_documents(documents, pieces):
        position = left.index(document.text, position) + len(document.text)
    for piece, document in zip(pieces, as_documents(documents, pieces), strict=True):
        assert piece.start < piece.end
        assert documents[piece.document].text[piece.start : piece.end] == document.text
    assert sum(p.end - p.start for p in visible_pieces(documents, None)) == sum(map(len, texts))
