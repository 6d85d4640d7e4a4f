"""The passages a drafter reads: found in the documents, or, to study retrieval, in another text or at given places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rapid.context import Piece, as_documents, in_documents
from rapid.documents import read_documents
from rapid.retrieval.ablation import given_passages, unrelated_text
from rapid.retrieval.index import Index
from rapid.types import Document, ScoredChunk

if TYPE_CHECKING:
    from rapid.models.base import ProgressFn
    from rapid.params import Retrieval
    from rapid.retrieval.embed import Embedder


class Passages:
    """Searches `pieces` of `documents`; an index is built at the first search that needs it.

    count     tokens of a text, for the target.
    embedder  the embedder that settings ask for.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        pieces: Sequence[Piece],
        count: Callable[[str], int],
        embedder: Callable[[Retrieval], Embedder | None],
    ) -> None:
        self._documents = documents
        self._pieces = pieces
        self._count = count
        self._embedder = embedder
        self._indexes: dict[str | None, Index] = {}  # of the documents, and of unrelated texts by name
        self._unrelated: dict[str | None, list[Document]] = {}

    def find(
        self, query: str, budget: int, retrieval: Retrieval, progress: ProgressFn | None
    ) -> tuple[list[ScoredChunk], list[str]]:
        """Passages of at most `budget` tokens, in document order, and what to tell the user about them."""
        if retrieval.source == "oracle":
            return given_passages(self._documents, retrieval.oracle_spans), []
        if retrieval.source == "unrelated":
            return self._find_unrelated(query, budget, retrieval, progress)
        index = self._index("", as_documents(self._documents, self._pieces), retrieval, progress)
        result = index.search(query, budget)
        return [in_documents(f, self._pieces) for f in result.chunks], [*index.warnings, *result.warnings]

    @property
    def sources(self) -> list[Document]:
        """What `document` of a passage counts: the documents, then the unrelated texts read so far."""
        return [*self._documents, *(text for texts in self._unrelated.values() for text in texts)]

    def _find_unrelated(
        self, query: str, budget: int, retrieval: Retrieval, progress: ProgressFn | None
    ) -> tuple[list[ScoredChunk], list[str]]:
        path = retrieval.unrelated
        if path not in self._unrelated:
            self._unrelated[path] = [unrelated_text()] if path is None else read_documents(path)
        texts = self._unrelated[path]
        result = self._index(path, texts, retrieval, progress).search(query, budget)
        first = self.sources.index(texts[0], len(self._documents))
        found = [replace(f, chunk=replace(f.chunk, document=first + f.chunk.document)) for f in result.chunks]
        return found, [f"the drafter's passages are of another text, {texts[0].name}"]

    def _index(
        self, name: str | None, texts: list[Document], retrieval: Retrieval, progress: ProgressFn | None
    ) -> Index:
        if name not in self._indexes:
            embedder = self._embedder(retrieval)
            self._indexes[name] = Index.build(texts, self._count, retrieval, embedder=embedder, progress=progress)
        return self._indexes[name]
