"""MagicDec's drafter and the drafter on the whole prompt: against slow twins, and lossless for every draft length."""

import pytest
import torch

import rapid
from rapid.decode.control import FixedDraft
from rapid.decode.governor import Governor
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.lookup import LookupDrafter, LookupIndex
from rapid.drafting.streaming import StreamingDrafter
from rapid.errors import InvalidParameter, ModelError, PromptTooLong
from rapid.models.hf import HFModel, HFSequence
from rapid.models.streaming import SLIDE, StreamingSequence
from rapid.models.toy import tiny
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp

TEXT = torch.randint(64, (420,), generator=torch.Generator().manual_seed(3)).tolist()


def masked_logits(model: HFModel, tokens: list[int], full: int, sinks: int, start: int) -> torch.Tensor:
    """The slow twin: one pass of transformers' own attention over all tokens, with the mask written out. The first
    `full` tokens see all before them; later ones the sinks and what stands from `start` on. Logits [n, V]."""
    rows, columns = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None]
    visible = (columns <= rows) & ((rows < full) | (columns < sinks) | (columns >= start))
    mask = torch.zeros(len(tokens), len(tokens)).masked_fill(~visible, -torch.inf)[None, None]
    ours = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return model.model(input_ids=torch.tensor([tokens]), attention_mask=mask).logits[0, :, : model.vocab_size]
    finally:
        model.model.set_attn_implementation(ours)


def read(model: HFModel, tokens: list[int]) -> HFSequence:
    sequence = model.new_sequence()
    sequence.prefill(tokens)
    return sequence


def computed(model: HFModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass of `model` from here on."""
    sizes: list[int] = []
    run = HFModel.run

    def counting(self, token_ids, *args, **kwargs):
        sizes.append(len(token_ids))
        return run(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(HFModel, "run", counting)
    return sizes


class TestSequence:
    @pytest.mark.parametrize("sinks", [0, 1, 4])
    @pytest.mark.parametrize("recent", [1, 16, 1000])
    @pytest.mark.parametrize("length", [2, 5, 300])
    def test_drafts_read_what_the_mask_shows(self, sinks, recent, length, monkeypatch):
        model = tiny(0)
        source = read(model, TEXT[:length])
        sequence = StreamingSequence(source, sinks=sinks, recent=recent)
        sizes = computed(model, monkeypatch)
        sequence.follow(TEXT[:length])
        assert sizes == []  # copied, not read again
        assert sequence.recent_start == max(sinks, length - recent)
        logits = torch.cat(
            [sequence.forward(TEXT[length : length + 3]), sequence.forward(TEXT[length + 3 : length + 4])]
        )
        expected = masked_logits(model, TEXT[: length + 4], length, sinks, sequence.recent_start)[length:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert sequence.cache.get_seq_length() == min(length, min(sinks, length) + recent) + 4

    def test_the_twin_notices_wrong_positions_and_wrong_windows(self):
        """Negative control: positions counted inside the cache, or a window one token off, are far outside rounding."""
        model = tiny(0)
        sequence = StreamingSequence(read(model, TEXT[:300]), sinks=4, recent=16)
        sequence.follow(TEXT[:300])
        expected = masked_logits(model, TEXT[:301], 300, 4, sequence.recent_start)[300:]
        shifted = model.run(TEXT[300:301], sequence.cache, logits_to_keep=0, first_position=20)
        assert (shifted - expected).abs().max() > 0.1
        wider = masked_logits(model, TEXT[:301], 300, 4, sequence.recent_start - 1)[300:]
        assert (wider - expected).abs().max() > 1e-3

    def test_the_window_slides_in_steps_and_is_never_short(self):
        model = tiny(0)
        source = read(model, TEXT[:100])
        sequence = StreamingSequence(source, sinks=4, recent=32)
        starts = set()
        for length in range(100, 400):
            sequence.follow(TEXT[:length])
            starts.add(sequence.recent_start)
            assert 32 <= length - sequence.recent_start <= 32 + SLIDE
            if length % 37 == 0:
                logits = sequence.forward(TEXT[length : length + 1])
                expected = masked_logits(model, TEXT[: length + 1], length, 4, sequence.recent_start)[-1:]
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
                sequence.rewind(length)
            source.forward(TEXT[length : length + 1])
        assert len(starts) == 3

    @pytest.mark.parametrize("back", [1, 7, 33, 90, 250])
    def test_a_rewind_as_deep_as_you_like(self, back):
        model = tiny(0)
        source = read(model, TEXT[:300])
        sequence = StreamingSequence(source, sinks=4, recent=32)
        sequence.follow(TEXT[:300])
        sequence.forward(TEXT[300:310])
        sequence.rewind(300 - back)
        assert list(sequence.token_ids) == TEXT[: 300 - back]
        other = [*TEXT[: 300 - back], 7, 8, 9]
        source.rewind(300 - back)
        source.prefill([7, 8])
        sequence.follow(other[:-1])
        logits = sequence.forward(other[-1:])
        expected = masked_logits(model, other, len(other) - 1, 4, sequence.recent_start)[-1:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert len(other) - 1 - sequence.recent_start >= min(32, len(other) - 5)
        with pytest.raises(ValueError, match="cannot rewind"):
            sequence.rewind(len(other) + 1)

    def test_what_the_source_has_not_read_is_computed(self):
        model = tiny(0)
        sequence = StreamingSequence(read(model, TEXT[:200]), sinks=4, recent=32)
        sequence.prefill(TEXT[:210])
        logits = sequence.forward(TEXT[210:211])
        expected = masked_logits(model, TEXT[:211], 200, 4, sequence.recent_start)[-1:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    def test_a_failure_half_way_leaves_it_usable(self, monkeypatch):
        model = tiny(0)
        sequence = StreamingSequence(read(model, TEXT[:200]), sinks=4, recent=32)
        sequence.follow(TEXT[:200])
        expected = sequence.forward(TEXT[200:201])
        sequence.rewind(200)
        with monkeypatch.context() as patch:
            patch.setattr(model._short_blocks.layers[1].out, "linears", [lambda x: 1 / 0])
            with pytest.raises(ZeroDivisionError):
                sequence.forward(TEXT[200:201])
        torch.testing.assert_close(sequence.forward(TEXT[200:201]), expected)

    def test_limits(self):
        source = read(tiny(0, window=64), TEXT[:60])
        with pytest.raises(InvalidParameter, match="sinks >= 0 and recent >= 1"):
            StreamingSequence(source, sinks=-1, recent=8)
        with pytest.raises(InvalidParameter, match="sinks >= 0 and recent >= 1"):
            StreamingSequence(source, sinks=4, recent=0)
        sequence = StreamingSequence(source, sinks=4, recent=8)
        sequence.follow(TEXT[:60])
        with pytest.raises(PromptTooLong, match="65 tokens do not fit the window of 64"):
            sequence.forward(TEXT[:5])


NEW = 48


def answer(model: HFModel, prompt: list[int], *, sinks=4, recent=24, gamma=4, warp=None, controller=None, lookup=False):
    target = read(model, prompt[:-1])
    drafters = {"streaming": StreamingDrafter(StreamingSequence(target, sinks=sinks, recent=recent), prompt, ())}
    if lookup:
        drafters["lookup"] = LookupDrafter(LookupIndex(prompt), ())
    for drafter in drafters.values():
        drafter.start()
    settings = DecodeSettings(warp or TokenWarp(), AcceptanceRule(), controller or FixedDraft("streaming", gamma))
    generator = torch.Generator().manual_seed(0)
    return list(decode(target, prompt, drafters, settings, StopRule(NEW), generator))


def ids(rounds) -> list[int]:
    return [token for r in rounds for token in r.token_ids]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return ids(answer(tiny(0), TEXT, controller=FixedDraft()))


class TestDrafter:
    @pytest.mark.parametrize("gamma", [1, 2, 3, 7, 20])
    @pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (4, 24), (4, 200), (4, 4096)])
    def test_greedy_is_plain_greedy(self, plain, sinks, recent, gamma):
        rounds = answer(tiny(0), TEXT, sinks=sinks, recent=recent, gamma=gamma)
        assert ids(rounds) == plain
        drafted, accepted = sum(r.num_drafted for r in rounds), sum(r.num_accepted for r in rounds)
        assert drafted > 0
        assert (accepted == drafted) == (recent == 4096)  # a cache of everything is the target itself

    def test_beside_other_drafters_under_the_governor(self, plain):
        controller = Governor({"streaming": 0.1, "lookup": 0.0})
        assert ids(answer(tiny(0), TEXT, controller=controller, lookup=True)) == plain

    def test_a_draft_is_a_function_of_the_emitted_text(self, plain):
        """What was drafted and rejected before leaves no trace in the cache."""
        model = tiny(0)
        target = read(model, TEXT[:-1])
        used = StreamingDrafter(StreamingSequence(target, sinks=4, recent=24), TEXT, ())
        used.start()
        generator = torch.Generator().manual_seed(0)
        for token in plain[:20]:
            used.propose(5, TokenWarp(), generator, need_probs=False)
            target.forward([([*TEXT, *plain])[target.length]])
            used.commit([token])
        first = used.propose(5, TokenWarp(1.0), generator.manual_seed(1), need_probs=True)
        # The window of the one that came a long way is longer by less than a slide: the other gets the same.
        recent = target.length - used._streaming.recent_start
        assert 24 < recent < 24 + SLIDE
        fresh = StreamingDrafter(StreamingSequence(target, sinks=4, recent=recent), [*TEXT, *plain[:20]], ())
        fresh.start()
        second = fresh.propose(5, TokenWarp(1.0), generator.manual_seed(1), need_probs=True)
        assert first.token_ids == second.token_ids
        assert torch.equal(first.probs, second.probs)

    def test_nothing_is_drafted_beyond_the_window(self):
        model = tiny(0, window=len(TEXT) + 10)
        rounds = answer(model, TEXT, gamma=20)
        assert len(ids(rounds)) == 11
        assert rounds[-1].finish_reason == "length"


# -- through sessions -------------------------------------------------------------------------------------------

REPORT = "\n\n".join(f"Room {i}: the key of room {i} hangs on nail {1000 - i}." for i in range(24))
QUESTION = "Where is the key of room 7?"
SMALL = {"streaming_sinks": 4, "streaming_window": 200}


def opened(engine: rapid.Engine) -> rapid.session.Session:
    return engine.open(rapid.Document(REPORT), retrieval=rapid.Retrieval("bm25", chunk_tokens=64), reserve_tokens=300)


def ask(session, method, gamma="auto", *, new=40, **options):
    speculation = rapid.Speculation(method, num_draft_tokens=gamma, **options)
    sampling = rapid.Sampling(max_new_tokens=new, temperature=options.pop("temperature", 0.0))
    return session.ask(QUESTION, speculation=speculation, sampling=sampling)


class TestSession:
    @pytest.mark.parametrize("gamma", [0, 1, 3, 10, "auto"])
    @pytest.mark.parametrize(("method", "options"), [("magicdec", SMALL), ("magicdec", {}), ("sd-full", {})])
    def test_lossless(self, tiny_engine, method, options, gamma):
        session = opened(tiny_engine)
        expected = ask(session, "lc")
        for _ in range(2):
            found = ask(session, method, gamma, **options)
            assert found.token_ids == expected.token_ids
            assert found.settings["lossless"]
            assert found.settings["eta"] == 0
            assert found.retrieved == []
            if gamma not in (0, "auto"):
                assert found.stats.drafted > 0
                whole = options is not SMALL
                assert (found.stats.acceptance_rate == 1) == whole

    def test_sd_full_with_another_drafter(self, tiny_engine, tiny_model_dir, make_model_dir):
        session = opened(rapid.Engine.load(tiny_model_dir, make_model_dir(seed=1)))
        found = ask(session, "sd-full", 4)
        assert found.token_ids == ask(opened(tiny_engine), "lc").token_ids
        assert found.draft_prompt_tokens == found.prompt_tokens
        assert found.stats.acceptance_rate < 0.2

    @pytest.mark.parametrize("method", ["magicdec", "sd-full"])
    def test_the_prompt_is_read_once(self, tiny_engine, method, monkeypatch):
        session = opened(tiny_engine)
        sizes = computed(tiny_engine.backend.target_model, monkeypatch)
        ask(session, method, 4, **(SMALL if method == "magicdec" else {}))
        assert max(sizes) < 120  # the words around the question; never the document again

    def test_one_copy_of_the_weights_and_a_small_cache(self, tiny_engine):
        session = opened(tiny_engine)
        ask(session, "lc")
        before = session._reader.num_bytes
        ask(session, "magicdec", 4, **SMALL)
        streaming = session._reader._streaming
        assert streaming.source.model is tiny_engine.backend.target_model
        per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
        assert 0 < session._reader.num_bytes - before <= (4 + 200 + SLIDE + 512 + 10) * per_token

    def test_settings_may_change_between_questions(self, tiny_engine):
        session = opened(tiny_engine)
        expected = ask(session, "lc").token_ids
        rates = []
        for window in (50, 200, 4096, 50):
            found = ask(session, "magicdec", 4, streaming_window=window)
            assert found.token_ids == expected
            assert found.settings["streaming_window"] == window
            rates.append(found.stats.acceptance_rate)
        assert rates[0] == rates[3] < rates[2] == 1

    def test_it_waits_for_the_target_where_another_drafter_is_elsewhere(
        self, tiny_engine, tiny_model_dir, make_model_dir, monkeypatch
    ):
        engine = rapid.Engine.load(tiny_model_dir, make_model_dir(seed=1))
        monkeypatch.setattr("rapid.backends.reader._device", id)
        sizes = computed(engine.backend.target_model, monkeypatch)
        session = engine.open(rapid.Document(REPORT), reserve_tokens=300, prefill=False)
        found = ask(session, "magicdec", 4, **SMALL)
        assert found.token_ids == ask(opened(tiny_engine), "lc").token_ids
        assert found.settings["drafter"] == "self"
        assert any("drafter" in warning and "is not used" in warning for warning in found.warnings)
        assert sum(sizes[: sizes.index(1)]) < 1.2 * found.prompt_tokens  # one reading of the prompt

    def test_a_model_that_counts_positions_by_itself_is_refused(self, monkeypatch):
        source = read(tiny(0), TEXT[:10])
        monkeypatch.setattr(source.model, "takes_positions", False)
        with pytest.raises(ModelError, match="counts positions by itself"):
            StreamingSequence(source, sinks=4, recent=8)

    def test_bad_settings_are_refused(self):
        for name, value in (("streaming_sinks", -1), ("streaming_window", 0), ("streaming_window", 1.5)):
            with pytest.raises(InvalidParameter, match=name):
                rapid.Speculation("magicdec", **{name: value})
        for method in ("magicdec", "sd-full"):
            with pytest.raises(InvalidParameter, match=f"method {method} is eta 0"):
                rapid.Speculation(method, eta=10)

    def test_a_model_without_a_cache_is_refused(self):
        from test_session import scripted

        with pytest.raises(ModelError, match="magicdec copies from the target's cache"):
            ask(scripted("ok"), "magicdec", 4)


@pytest.mark.embedded
def test_the_embedded_model(embedded_engine):
    from test_embedded_equality import EXCERPTS, QUESTIONS

    document = rapid.Document((EXCERPTS / "renewable_fuel.txt").read_text(encoding="utf-8"))
    session = embedded_engine.open(document, retrieval=rapid.Retrieval("bm25"))
    sampling = rapid.Sampling(max_new_tokens=32)

    def asked(method: str, **options) -> rapid.Answer:
        speculation = rapid.Speculation(method, num_draft_tokens=4, **options)
        return session.ask(QUESTIONS["renewable_fuel"], speculation=speculation, sampling=sampling)

    expected = asked("lc")
    for options, rate in (({"streaming_window": 256}, 0.2), ({"streaming_window": 4096}, 1.0)):
        found = asked("magicdec", **options)
        assert found.token_ids == expected.token_ids
        assert rate <= found.stats.acceptance_rate <= 1
    full = asked("sd-full")
    assert full.token_ids == expected.token_ids
    assert full.stats.acceptance_rate == 1
