"""Documents, ready to be searched: chunked and embedded once, for many questions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rapid import paths
from rapid.errors import DocumentError, InvalidParameter
from rapid.params import Retrieval
from rapid.retrieval import rank
from rapid.retrieval.cache import ArrayCache, digest
from rapid.retrieval.chunk import TokenCounter, chunk_document
from rapid.retrieval.embed import Embedder, ProgressFn, load_embedder
from rapid.retrieval.select import select
from rapid.types import Chunk, Document, ScoredChunk

# Part of the cache keys: to be raised whenever chunk.py or the windows of embed.py cut differently.
_SCHEME = "1"
# Places of a document, and characters at each, that tell one tokenizer from another.
_PROBES = 8
_PROBE_CHARS = 2000


@dataclass(frozen=True)
class Retrieved:
    """What a question found: `chunks` in document order, never none.

    `fallback`: nothing passed the threshold, and the one chunk is the best of those below it.
    `num_tokens`: of all chunks, each counted by itself.
    """

    chunks: list[ScoredChunk]
    num_tokens: int
    fallback: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Dense:
    """Windows of all chunks [w, d], how many each chunk has [n], and what embeds the queries."""

    embedder: Embedder
    vectors: npt.NDArray[np.float32]
    counts: list[int]


class Index:
    """Chunks of some documents with what is needed to rank them. Made by `Index.build`."""

    def __init__(
        self,
        chunks: list[Chunk],
        token_counts: list[int],
        settings: Retrieval,
        dense: _Dense | None,
        warnings: list[str],
    ) -> None:
        self.chunks = chunks
        self.token_counts = token_counts
        self.settings = settings
        self.warnings = warnings
        self._dense = dense
        self._bm25 = None if settings.ranking == "dense" else rank.Bm25([c.text for c in chunks])

    @classmethod
    def build(
        cls,
        documents: Sequence[Document],
        count_tokens: TokenCounter,
        settings: Retrieval,
        embedder: Embedder | None = None,
        cache_dir: Path | None = None,
        progress: ProgressFn | None = None,
    ) -> Index:
        """Chunk and embed `documents`, or read both from the cache.

        `embedder`: None loads the one the settings name; ranking bm25 needs none and loads none.
        `cache_dir`: the parent of the `embeddings` directory; None is `paths.cache_dir()`.
        `progress` is called with (windows embedded, windows in all).
        What went wrong with the cache is in `warnings` and never fatal.
        Raises `DocumentError` when no document holds text, `ModelError` when the embedder cannot be loaded.
        """
        cache = ArrayCache((cache_dir or paths.cache_dir()) / "embeddings")
        chunks, token_counts = _chunks(documents, count_tokens, settings.chunk_tokens, cache)
        if not chunks:
            names = ", ".join(d.name for d in documents) or "the list of documents"
            raise DocumentError(f"{names}: there is no text to search; give a document with text in it")
        dense = None
        if settings.ranking != "bm25":
            dense = _embed(chunks, embedder or load_embedder(settings.embedder), cache, progress)
        return cls(chunks, token_counts, settings, dense, cache.warnings)

    def search(self, query: str, budget_tokens: int) -> Retrieved:
        """The best chunks for `query` within `budget_tokens`, in document order; at least one.

        The scores are cosines for ranking dense, BM25 for bm25, fused reciprocal ranks for hybrid. The threshold
        (the settings' or the embedder's) is on the cosine; bm25 leaves out what shares no word with the query.
        """
        if not query.strip():
            raise InvalidParameter("the question is empty; ask one")
        scores, eligible = self._score(query)
        numbers, fallback = select(scores, self.token_counts, budget_tokens, eligible)
        warnings = []
        if fallback:
            warnings.append("no passage is similar enough to the question: the drafter reads only the nearest one")
        return Retrieved(
            chunks=[ScoredChunk(self.chunks[i], float(scores[i])) for i in numbers],
            num_tokens=sum(self.token_counts[i] for i in numbers),
            fallback=fallback,
            warnings=warnings,
        )

    def _score(self, query: str) -> tuple[rank.Scores, npt.NDArray[np.bool_] | None]:
        """Scores [n], and which chunks may be taken [n] (None: all)."""
        by_words = self._bm25.scores(query) if self._bm25 is not None else None
        if self._dense is None:
            assert by_words is not None
            return by_words, by_words > 0
        embedder = self._dense.embedder
        cosine = rank.dense(self._dense.vectors, self._dense.counts, embedder.embed_query(query))
        threshold = self.settings.threshold
        threshold = embedder.default_threshold if threshold is None else threshold
        eligible = None if threshold is None else cosine >= threshold
        return (cosine if by_words is None else rank.hybrid(cosine, by_words)), eligible


def _chunks(
    documents: Sequence[Document], count_tokens: TokenCounter, max_tokens: int, cache: ArrayCache
) -> tuple[list[Chunk], list[int]]:
    """Chunks of all documents in order and the tokens of each.

    A token counter has no name to be part of the cache key: what it says about samples of the text stands for it.
    """
    probes = [
        count_tokens(d.text[start : start + _PROBE_CHARS])
        for d in documents
        for start in range(0, len(d.text), max(_PROBE_CHARS, len(d.text) // _PROBES))
    ]
    version = importlib.metadata.version("semchunk")
    key = digest(["chunks", _SCHEME, version, str(max_tokens), str(probes), *(d.text for d in documents)])
    saved = cache.load(key, ["spans", "token_counts"])
    if saved is None:
        chunks = [c for i, d in enumerate(documents) for c in chunk_document(d, i, count_tokens, max_tokens)]
        token_counts = [count_tokens(c.text) for c in chunks]
        spans = np.array([(c.document, c.start, c.end) for c in chunks], dtype=np.int64)
        cache.save(key, {"spans": spans, "token_counts": np.array(token_counts, dtype=np.int64)})
        return chunks, token_counts
    chunks = [
        Chunk(number, start, end, documents[number].text[start:end]) for number, start, end in saved["spans"].tolist()
    ]
    return chunks, saved["token_counts"].tolist()


def _embed(chunks: list[Chunk], embedder: Embedder, cache: ArrayCache, progress: ProgressFn | None) -> _Dense:
    """Vectors of the windows of all chunks."""
    key = digest(["vectors", _SCHEME, embedder.name, *(c.text for c in chunks)])
    saved = cache.load(key, ["vectors", "counts"])
    if saved is None:
        windows = [embedder.windows(c.text) for c in chunks]
        counts = [len(w) for w in windows]
        vectors = embedder.embed_passages([w for of_chunk in windows for w in of_chunk], progress)
        cache.save(key, {"vectors": vectors, "counts": np.array(counts, dtype=np.int64)})
        return _Dense(embedder, vectors, counts)
    return _Dense(embedder, saved["vectors"].astype(np.float32, copy=False), saved["counts"].tolist())
