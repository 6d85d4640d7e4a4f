"""One score a passage: by meaning (dense), by words (bm25), or by the ranks of both (hybrid)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]

# Constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009).
_RRF_K = 60

# Kana, ideographs and Hangul: written without spaces, or with endings glued on.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_WORDS = re.compile(rf"(?P<cjk>[{_CJK}]+)|[^\W{_CJK}]+")


def words(text: str) -> list[str]:
    """The words of `text` for bm25, lower-cased; of CJK runs each character and each pair of neighbours."""
    found: list[str] = []
    for match in _WORDS.finditer(text.casefold()):
        run = match.group()
        if match["cjk"]:
            found += [*run, *(run[i : i + 2] for i in range(len(run) - 1))]
        else:
            found.append(run)
    return found


def dense(vectors: npt.NDArray[np.float32], counts: Sequence[int], query: npt.NDArray[np.float32]) -> Scores:
    """Cosine of the query [d] with the best window of each passage, [n].

    `vectors` [w, d] holds the windows of all passages in order, `counts` [n] how many each passage has; all
    vectors have length 1.
    """
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp)
    best: Scores = np.maximum.reduceat(vectors @ query, starts)
    return best


class Bm25:
    """Words of passages, weighed by BM25 (Lucene's form, k1 1.5, b 0.75)."""

    def __init__(self, texts: Sequence[str]) -> None:
        import bm25s

        corpus = [words(text) for text in texts]
        self._num_texts = len(corpus)
        self._model: Any = None
        if any(corpus):  # bm25s divides by the mean length
            self._model = bm25s.BM25()
            self._model.index(corpus, show_progress=False)

    def scores(self, query: str) -> Scores:
        """BM25 of each passage, [n]; 0 where it shares no word with the query."""
        found = words(query)
        if self._model is None or not found:
            return np.zeros(self._num_texts, dtype=np.float32)
        return np.asarray(self._model.get_scores(found), dtype=np.float32)


def hybrid(dense_scores: Scores, bm25_scores: Scores) -> Scores:
    """Reciprocal rank fusion, [n]: the sum of 1 / (60 + rank) over both rankings, ranks from 1.

    A passage that shares no word with the query has no rank in bm25 and gets nothing from it.
    """
    fused = _reciprocal_ranks(dense_scores) + np.where(bm25_scores > 0, _reciprocal_ranks(bm25_scores), 0.0)
    return fused.astype(np.float32)


def _reciprocal_ranks(scores: Scores) -> npt.NDArray[np.float64]:
    ranks = np.empty(len(scores))
    ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
    return 1.0 / (_RRF_K + ranks)
