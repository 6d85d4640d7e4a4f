"""Ranking, selection, the index and its cache, with an embedder of hashed words that is fast and exact."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zlib

import numpy as np
import pytest

from rapid import paths
from rapid.errors import DocumentError, InvalidParameter
from rapid.params import Retrieval
from rapid.retrieval import Index, context_budget, join_chunks, rank
from rapid.retrieval.cache import ArrayCache, digest
from rapid.retrieval.select import select
from rapid.types import Chunk, Document, ScoredChunk


def count_words(text: str) -> int:
    return len(text.split())


class BagOfWords:
    """Vectors of hashed words; windows of five words."""

    default_threshold: float | None = None

    def __init__(self, name="bag-1"):
        self.name = name
        self.embedded: list[str] = []

    def windows(self, text):
        words = text.split()
        return [" ".join(words[i : i + 5]) for i in range(0, max(1, len(words) - 2), 3)]

    def embed_passages(self, texts, progress=None):
        self.embedded += texts
        for done in range(1, len(texts) + 1):
            if progress:
                progress(done, len(texts))
        return np.stack([self.embed_query(t) for t in texts])

    def embed_query(self, text):
        vector = np.full(512, 1e-3, dtype=np.float32)
        for word in rank.words(text):
            vector[zlib.crc32(word.encode()) % 512] += 1
        return vector / np.linalg.norm(vector)


FACTS = Document(
    "Valve 7 is shut.\n\nPump 3 is on.\n\nValve 7 is shut.\n\nPump 9 is on.\n\nThe cook sleeps late.", "facts"
)


@pytest.fixture
def build(tmp_path):
    def build(documents=(FACTS,), embedder=None, tokens=5, count=count_words, **settings):
        chosen = Retrieval(chunk_tokens=16, **settings)
        object.__setattr__(chosen, "chunk_tokens", tokens)  # smaller than a user may ask for
        return Index.build(list(documents), count, chosen, embedder or BagOfWords(), tmp_path)

    return build


# The budget: the paper's rule in tokens.


@pytest.mark.parametrize(
    ("context", "window", "passages"),
    [
        (120_000, 131_072, 10),  # the paper's own figure
        (98_304, 131_072, 8),
        (98_305, 131_072, 9),
        (4096, 131_072, 8),
        (1000, 131_072, 2),
        (200_000, 131_072, 11),  # capped at the window
        (32_000, 32_768, 8),
        (8_000, 8_192, 2),
        (400, 8_192, 1),
    ],
)
def test_context_budget(context, window, passages):
    assert context_budget(context, window) == 512 * passages


def test_context_budget_is_the_papers_rule_at_wide_windows():
    for length in range(1, 131_072, 997):
        k = int(np.ceil(max(length / (512 * 24), min(4096 / 512, length / 512))))
        assert context_budget(length, 131_072) == 512 * k


def test_context_budget_stays_small_in_small_windows_and_above_zero():
    assert context_budget(256, 256) == 32
    assert context_budget(2048, 2048) == 256
    assert context_budget(0, 8192) >= 1
    assert context_budget(1, 1) >= 1


# Selection.


def scores(*values):
    return np.array(values, dtype=np.float32)


def test_select_takes_the_best_that_fit_in_document_order():
    assert select(scores(0.1, 0.9, 0.5, 0.8), [10, 10, 10, 10], 30) == ([1, 2, 3], False)
    assert select(scores(0.1, 0.9, 0.5, 0.8), [10, 10, 10, 10], 29) == ([1, 3], False)


def test_smaller_passages_let_more_in():
    assert len(select(scores(*range(9)), [512] * 9, 4096)[0]) == 8
    assert len(select(scores(*range(99)), [100] * 99, 4096)[0]) == 40


def test_select_always_returns_the_best_even_beyond_the_budget():
    assert select(scores(0.1, 0.9), [10, 50], 20) == ([1], False)


def test_select_is_a_prefix_of_the_ranking():
    # the second best does not fit: nothing worse takes its place
    assert select(scores(0.9, 0.8, 0.1), [10, 50, 5], 20) == ([0], False)


def test_select_threshold_and_fallback():
    values = scores(0.1, 0.9, 0.5)
    assert select(values, [1, 1, 1], 9, values >= 0.5) == ([1, 2], False)
    assert select(values, [1, 1, 1], 9, values >= 0.95) == ([1], True)


def test_equal_scores_rank_in_document_order():
    assert select(scores(0.5, 0.5, 0.5), [1, 1, 1], 2) == ([0, 1], False)


def test_select_against_a_plain_twin():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 12))
        values = rng.integers(0, 4, n).astype(np.float32)
        counts = rng.integers(1, 20, n).tolist()
        budget = int(rng.integers(1, 60))
        chosen, used = [], 0
        for i in sorted(range(n), key=lambda i: (-values[i], i)):
            if chosen and used + counts[i] > budget:
                break
            chosen.append(i)
            used += counts[i]
        assert select(values, counts, budget) == (sorted(chosen), False)


def test_join_chunks_restores_document_order():
    text = "aa bb cc"
    chunks = [Chunk(0, i, i + 2, text[i : i + 2]) for i in (0, 3, 6)]
    other = ScoredChunk(Chunk(1, 0, 1, "z"), 0.5)
    assert join_chunks([other, chunks[2], chunks[0], chunks[1]]) == "aa\n\nbb\n\ncc\n\nz"
    assert join_chunks([]) == ""


# Ranking.


def test_dense_is_the_best_window_of_each_passage():
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(9, 4)).astype(np.float32)
    query = rng.normal(size=4).astype(np.float32)
    cosines = vectors @ query
    expected = [cosines[:2].max(), cosines[2], cosines[3:].max()]
    assert rank.dense(vectors, [2, 1, 6], query).tolist() == pytest.approx(expected)


def test_words():
    assert rank.words("The Valve-7, ÉTÉ!") == ["the", "valve", "7", "été"]
    assert rank.words("在三号 pump") == ["在", "三", "号", "在三", "三号", "pump"]


def test_bm25_finds_rare_words_and_scores_nothing_for_strange_ones():
    bm25 = rank.Bm25(["the pump is on", "the valve is shut", "the pump is red", "!!!"])
    found = bm25.scores("is the valve shut?")
    assert found.argmax() == 1
    assert found[0] > 0 == found[3]
    assert not bm25.scores("zebra").any()
    assert not bm25.scores("?").any()
    assert not rank.Bm25(["...", "!"]).scores("pump").any()


def test_bm25_of_chinese():
    bm25 = rank.Bm25(["水泵在二号房间。", "阀门在三号房间。", "厨师睡得很晚。"])
    assert bm25.scores("阀门在哪里").argmax() == 1


def test_bm25_prints_nothing(capfd):
    rank.Bm25(["the pump is on"] * 500).scores("pump")
    assert capfd.readouterr() == ("", "")


def test_hybrid_is_reciprocal_rank_fusion():
    fused = rank.hybrid(scores(0.1, 0.9, 0.5), scores(7, 0, 9))
    assert fused.tolist() == pytest.approx([1 / 63 + 1 / 62, 1 / 61, 1 / 62 + 1 / 61])


def test_hybrid_without_common_words_is_the_dense_ranking():
    fused = rank.hybrid(scores(0.1, 0.9, 0.5), scores(0, 0, 0))
    assert np.argsort(-fused).tolist() == [1, 2, 0]


# The index.


@pytest.mark.parametrize("ranking", ["dense", "bm25", "hybrid"])
def test_search_finds_the_passage(build, ranking):
    found = build(ranking=ranking).search("Does the cook sleep late?", 5)
    assert [c.chunk.text for c in found.chunks] == ["The cook sleeps late."]
    assert found.num_tokens == 4
    assert not found.fallback
    assert not found.warnings


def test_identical_passages_are_kept_apart_in_document_order(build):
    # case B33: all passages, then only the last two facts
    index = build()
    spans = [(c.chunk.start, c.chunk.end) for c in index.search("valve and pump", 1000).chunks]
    assert spans == [(0, 16), (18, 31), (33, 49), (51, 64), (66, 87)]
    best = index.search("Valve 7 is shut.", 8).chunks
    assert [c.chunk.start for c in best] == [0, 33]
    assert all(FACTS.text[c.chunk.start : c.chunk.end] == c.chunk.text for c in best)


def test_several_documents_keep_their_numbers(build):
    other = Document("Nobody knows the captain.", "other")
    found = build([FACTS, other]).search("captain", 4)
    assert [(c.chunk.document, c.chunk.start) for c in found.chunks] == [(1, 0)]
    everything = build([other, FACTS]).search("captain", 1000)
    assert [c.chunk.document for c in everything.chunks] == [0, 1, 1, 1, 1, 1]


def test_the_end_of_a_passage_counts(build):
    filler = " ".join(f"filler{i}" for i in range(60))
    documents = [Document(f"{filler} {ending}") for ending in ("grey cats", "the vault code", "blue sky")]
    found = build(documents, tokens=70).search("the vault code", 62)
    assert [c.chunk.document for c in found.chunks] == [1]


def test_short_document_is_retrieved_once(build):
    # case B35
    found = build([Document("Ok.")]).search("Is it ok?", 5000)
    assert [(c.chunk.start, c.chunk.end) for c in found.chunks] == [(0, 3)]


@pytest.mark.parametrize("texts", [[""], [" \n\t "], ["", "\n"], []])
def test_blank_documents_are_refused(build, texts):
    with pytest.raises(DocumentError, match="no text"):
        build([Document(t, "blank.txt") for t in texts])


def test_blank_question_is_refused(build):
    with pytest.raises(InvalidParameter, match="question is empty"):
        build().search(" \n", 100)


def test_threshold_of_the_settings_and_of_the_embedder(build):
    assert len(build(threshold=0.9).search("Valve 7 is shut.", 100).chunks) == 2
    strict = BagOfWords()
    strict.default_threshold = 0.9
    assert len(build(embedder=strict).search("Valve 7 is shut.", 100).chunks) == 2
    assert len(build(embedder=strict, threshold=-1.0).search("Valve 7 is shut.", 100).chunks) == 5


@pytest.mark.parametrize("settings", [{"threshold": 0.99}, {"ranking": "bm25"}], ids=["dense", "bm25"])
def test_nothing_similar_falls_back_to_one_passage_and_says_so(build, settings):
    found = build(**settings).search("zebra", 100)
    assert found.fallback
    assert len(found.chunks) == 1
    assert "no passage" in found.warnings[0]


def test_bm25_has_no_threshold(build):
    with pytest.raises(InvalidParameter, match="bm25"):
        build(ranking="bm25", threshold=0.3)


def test_bm25_needs_no_embedder(build, monkeypatch):
    monkeypatch.setattr("rapid.retrieval.index.load_embedder", lambda name: pytest.fail("embedder loaded"))
    embedder = BagOfWords()
    build(embedder=embedder, ranking="bm25").search("valve", 100)
    assert not embedder.embedded


def test_the_settings_name_the_embedder(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("rapid.retrieval.index.load_embedder", lambda n: asked.append(n) or BagOfWords())
    Index.build([FACTS], count_words, Retrieval(embedder="some/model"), None, tmp_path)
    assert asked == ["some/model"]


# The cache.


def test_second_index_embeds_and_chunks_nothing(tmp_path):
    embedder, progress = BagOfWords(), []
    first = Index.build(
        [FACTS], count_words, Retrieval(), embedder, tmp_path, lambda done, total: progress.append((done, total))
    )
    assert progress[-1] == (len(embedder.embedded),) * 2
    counted = []
    again = Index.build(
        [FACTS], lambda t: counted.append(t) or count_words(t), Retrieval(), again_embedder := BagOfWords(), tmp_path
    )
    assert not again_embedder.embedded
    assert len(counted) == 1, "only the probe of the tokenizer"
    assert again.chunks == first.chunks
    assert again.token_counts == first.token_counts
    assert again.search("cook", 9) == first.search("cook", 9)
    assert not again.warnings


@pytest.mark.parametrize("what", ["text", "embedder", "chunk_tokens", "tokenizer"])
def test_whatever_changes_the_vectors_changes_the_key(build, what):
    build()
    embedder = BagOfWords("bag-2" if what == "embedder" else "bag-1")
    documents = [Document(FACTS.text + " And soundly.")] if what == "text" else [FACTS]
    tokens = 9 if what == "chunk_tokens" else 5
    count = (lambda t: 2 * count_words(t)) if what == "tokenizer" else count_words
    build(documents, embedder, tokens, count)
    assert embedder.embedded


def test_keys_respect_borders():
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest(["\ud800"]) != digest([""])


def test_every_damaged_byte_is_noticed_or_harmless(tmp_path):
    cache = ArrayCache(tmp_path)
    arrays = {"vectors": np.arange(6, dtype=np.float32).reshape(2, 3), "counts": np.array([1, 1])}
    cache.save("key", arrays)
    path = tmp_path / "key.npz"
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :])
        loaded = cache.load("key", list(arrays))
        if loaded is not None:
            assert all(np.array_equal(loaded[name], arrays[name]) for name in arrays), f"byte {i}"
    assert cache.warnings


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b"x" * len(b)])
def test_damaged_files_are_made_again_with_a_notice(build, tmp_path, damage):
    expected = build().search("cook", 9)
    files = sorted(tmp_path.glob("embeddings/*.npz"))
    assert len(files) == 2
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    index = build()
    assert index.search("cook", 9) == expected
    assert len(index.warnings) == 2
    assert all("made again" in w and "\n" not in w for w in index.warnings)
    assert not build().warnings


def test_a_full_disk_costs_the_cache_and_not_the_answer(build, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rapid.retrieval.cache.os.replace", full)
    index = build()
    assert index.search("cook", 4).chunks
    assert len(index.warnings) == 1
    assert "No space left" in index.warnings[0]
    assert "RAPID_CACHE_DIR" in index.warnings[0]
    assert not list((tmp_path / "embeddings").iterdir()), "a temporary file was left"


def test_a_cache_directory_that_is_a_file(tmp_path):
    (tmp_path / "embeddings").write_text("not a directory")
    index = Index.build([FACTS], count_words, Retrieval(), BagOfWords(), tmp_path)
    assert index.warnings
    assert index.search("cook", 9).chunks


def test_two_processes_on_one_cache(tmp_path):
    """A reader never sees half a file while two writers replace it all the time."""
    writer = (
        "import sys, numpy as np; from pathlib import Path; from rapid.retrieval.cache import ArrayCache\n"
        "cache = ArrayCache(Path(sys.argv[1])); value = int(sys.argv[2])\n"
        "for _ in range(200):\n"
        "    cache.save('key', {'a': np.full(20_000, value)})\n"
        "assert not cache.warnings, cache.warnings\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", writer, str(tmp_path), str(i)]) for i in (1, 2)]
    cache, reads = ArrayCache(tmp_path), 0
    while any(w.poll() is None for w in writers):
        loaded = cache.load("key", ["a"])
        if loaded is not None:
            reads += 1
            assert len(np.unique(loaded["a"])) == 1
    assert [w.returncode for w in writers] == [0, 0]
    assert reads
    assert not cache.warnings
    assert [p.name for p in tmp_path.iterdir()] == ["key.npz"]


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path / "here"))
    assert paths.cache_dir() == tmp_path / "here"
    Index.build([FACTS], count_words, Retrieval(), BagOfWords())
    assert len(list((tmp_path / "here" / "embeddings").iterdir())) == 2
    monkeypatch.delenv("RAPID_CACHE_DIR")
    assert paths.cache_dir().name == "rapid"


def test_importing_retrieval_loads_nothing_heavy():
    code = (
        "import sys, rapid.retrieval, rapid.paths\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'bm25s', 'semchunk'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
