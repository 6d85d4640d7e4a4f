"""Drafters with a tokenizer of their own: how text crosses from one vocabulary to the other, and the law of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rapid
from rapid.backends.base import ModelInfo
from rapid.backends.local import LocalBackend
from rapid.decode.control import FixedDraft
from rapid.decode.governor import Governor
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.retokenize import RetokenizingDrafter
from rapid.errors import VocabularyMismatch
from rapid.models.toy import Markov, Script, ToySequence, tiny
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp
from rapid.types import Proposal, Verdict
from rapid.vocabulary import Vocabulary, first_difference
from test_laws import total_variation, tv_bound
from toy_tokenizers import bpe_tokenizer, byte_tokenizer, legacy_tokenizer, unigram_tokenizer

TOKENIZERS = {
    "bytes": byte_tokenizer,
    "bpe": bpe_tokenizer,
    "unigram always": lambda: unigram_tokenizer("always"),
    "unigram first": lambda: unigram_tokenizer("first"),
    "unigram never": lambda: unigram_tokenizer("never"),
    "legacy": legacy_tokenizer,
}
BYTE_LEVEL = ("bytes", "bpe")


def vocabulary(name: str) -> Vocabulary:
    tokenizer = TOKENIZERS[name]()
    return Vocabulary(tokenizer, len(tokenizer))


class TestFirstDifference:
    def test_contents_are_compared(self):
        assert first_difference(byte_tokenizer(), byte_tokenizer()) is None
        difference = first_difference(byte_tokenizer(), bpe_tokenizer())
        assert difference is not None
        assert difference.startswith("token ")

    def test_a_longer_tokenizer_differs(self):
        longer = byte_tokenizer()
        longer.add_tokens(["one more"])
        added = len(longer) - 1
        assert first_difference(byte_tokenizer(), longer) == (
            f"token {added} is None for the target and 'one more' for the drafter"
        )


class TestContinuation:
    TEXTS = ("The lamp stood on the table.", "What is the name of the valve?", "user assistant system")

    @pytest.mark.parametrize("name", TOKENIZERS)
    @pytest.mark.parametrize("text", TEXTS)
    def test_at_every_place_the_text_goes_on_where_it_was_cut(self, name, text):
        """Whatever was emitted, in whatever segmentation: emitted and continuation together decode to the text."""
        ours = vocabulary(name)
        written = 0
        for cut in range(len(text)):
            emitted = ours.encode(text[:cut])
            follows = ours.continuation(emitted, text[cut:])
            if follows:
                written += 1
                assert ours.decode([*emitted, *follows]).lstrip() == text
        # Metaspace tokenizers have no token for some parts of words.
        assert written == len(text) if name in BYTE_LEVEL else written > 0.9 * len(text)

    def test_at_a_boundary_it_is_the_rest_of_the_tokens(self):
        ours = vocabulary("bpe")
        ids = ours.encode(self.TEXTS[0])
        for cut in range(len(ids)):
            rest = self.TEXTS[0][len(ours.decode(ids[:cut])) :]
            assert ours.continuation(ids[:cut], rest) == ids[cut:]

    def test_a_token_over_the_seam_is_cut_there_and_only_there(self):
        ours = vocabulary("bpe")
        whole = ours.encode("the lamp stood")
        follows = ours.continuation(ours.encode("the la"), "mp stood")
        assert ours.decode(follows) == "mp stood"
        assert follows[-1] == whole[-1]

    @pytest.mark.parametrize("name", BYTE_LEVEL)
    def test_an_unfinished_character_is_finished(self, name):
        ours = vocabulary(name)
        ids = ours.encode("a 🦜 b")
        unfinished = [i for i in range(len(ids)) if ours.decode(ids[:i]).endswith("\ufffd")]
        assert len(unfinished) in (1, 2, 3)
        for cut in unfinished:
            assert ours.whole_characters(ids[:cut]) == "a "
            assert ours.continuation(ids[:cut], "🦜 b") == ids[cut:]
            assert ours.continuation(ids[:cut], "owl") == []  # does not begin with those bytes

    def test_special_tokens_stay_text(self):
        ours = vocabulary("bpe")
        follows = ours.continuation(ours.encode("a"), "</s><|im_end|>")
        assert ours.decode(follows) == "</s><|im_end|>"
        assert not set(follows) & ours.special_ids

    def test_ids_without_a_row_in_the_model_are_left_out(self):
        tokenizer = byte_tokenizer()
        last = Vocabulary(tokenizer, len(tokenizer)).encode("é")[0]
        assert Vocabulary(tokenizer, last).continuation([], "ab") == Vocabulary(tokenizer, 10**6).encode("ab")
        assert Vocabulary(tokenizer, last).continuation([], "aéb") == Vocabulary(tokenizer, 10**6).encode("a")


# -- the drafter ------------------------------------------------------------------------------------------------


class TextScript:
    """Says `text`, then its end token, from any place in it and after any segmentation: an able language model.

    The answer is what stands behind the last `prompt_end` token.
    """

    num_parameters = 0

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, *, prompt_end: int, window: int = 10**6) -> None:
        self.name = "text script"
        self.vocab_size = len(tokenizer)
        self.window = window
        self.eos_token_ids = frozenset([tokenizer.eos_token_id])
        self._text = text
        self._vocabulary = Vocabulary(tokenizer, len(tokenizer))
        self._prompt_end = prompt_end

    def new_sequence(self) -> ToySequence:
        return ToySequence(self)

    def step_bytes(self, length: int) -> int:
        return 1

    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        logits = torch.full((len(token_ids) - start, self.vocab_size), -torch.inf)
        for row in range(len(logits)):
            read = list(token_ids[: start + row + 1])
            answer = read[len(read) - read[::-1].index(self._prompt_end) :] if self._prompt_end in read else []
            said = self._vocabulary.whole_characters(answer).lstrip()
            follows = self._vocabulary.continuation(answer, self._text[len(said) :])
            going_on = self._text.startswith(said) and follows
            logits[row, follows[0] if going_on else min(self.eos_token_ids)] = 0
        return logits


def script(tokenizer: PreTrainedTokenizerFast, text: str, window: int = 10**6) -> TextScript:
    """Says `text` after a token 0, which no text here has."""
    return TextScript(tokenizer, text, prompt_end=0, window=window)


def drafter(
    model, tokenizer, target_name: str, prompt: Sequence[int] = (0,)
) -> tuple[RetokenizingDrafter, ToySequence]:
    sequence = model.new_sequence()
    made = RetokenizingDrafter(
        sequence,
        prompt,
        model.eos_token_ids,
        draft_vocabulary=Vocabulary(tokenizer, model.vocab_size),
        target_vocabulary=vocabulary(target_name),
    )
    made.start()
    return made, sequence


def propose(made: RetokenizingDrafter, num_tokens: int) -> list[int]:
    proposal = made.propose(num_tokens, TokenWarp(1.0), torch.Generator(), need_probs=True)
    assert proposal.probs is None
    return proposal.token_ids


TEXT = "The lamp stood on the table, and the owl 🦉 looked at the naïve café."


@pytest.mark.parametrize("target", TOKENIZERS)
@pytest.mark.parametrize("draft", ["bytes", "bpe"])
class TestDrafter:
    def test_the_same_text_in_other_tokens_is_accepted_throughout(self, target, draft):
        text = TEXT if target in BYTE_LEVEL else "The lamp stood on the table and the shore"
        ours, theirs = TOKENIZERS[target](), TOKENIZERS[draft]()
        made, _ = drafter(script(theirs, text), theirs, target)
        emitted: list[int] = []
        while vocabulary(target).decode(emitted).lstrip() != text:
            found = propose(made, 5)
            if target == draft:
                assert found == vocabulary(target).encode(text)[len(emitted) : len(emitted) + 5]
            made.commit(found)
            emitted += found
            assert text.startswith(vocabulary(target).whole_characters(emitted).lstrip())
            assert found
        assert propose(made, 5) == []  # the drafter's end token does not cross
        assert len(ours) != len(theirs) or target == draft

    def test_the_drafters_reading_follows_what_was_emitted_instead(self, target, draft):
        theirs = TOKENIZERS[draft]()
        made, sequence = drafter(script(theirs, "The lamp stood"), theirs, target)
        propose(made, 6)
        other = vocabulary(target).encode("What is")
        made.commit(other)
        propose(made, 1)
        text = vocabulary(target).decode(other)
        read = Vocabulary(theirs, len(theirs)).encode(text)
        assert sequence.token_ids[: 1 + len(read)] == [0, *read]


class TestEnds:
    def test_special_tokens_end_a_draft_and_are_not_in_it(self):
        tokenizer = byte_tokenizer()
        theirs = Vocabulary(tokenizer, len(tokenizer))
        marker = tokenizer.convert_tokens_to_ids("<|im_start|>")
        model = Script(
            [*theirs.encode("ab"), marker, *theirs.encode("cd")], vocab_size=len(tokenizer), eos_token_ids=[1]
        )
        made, _ = drafter(model, tokenizer, "bpe")
        assert vocabulary("bpe").decode(propose(made, 8)) == "ab"

    @pytest.mark.parametrize("window", [4, 10, 20])
    def test_nothing_is_drafted_beyond_the_window(self, window):
        tokenizer = byte_tokenizer()
        made, sequence = drafter(script(tokenizer, TEXT, window), tokenizer, "bpe", prompt=[0, 0, 0])
        emitted: list[int] = []
        for _ in range(30):
            found = propose(made, 4)
            emitted += found or vocabulary("bpe").encode(TEXT)[len(emitted) : len(emitted) + 1]
            made.commit(emitted[-len(found or [0]) :])
        assert sequence.peak <= window
        assert propose(made, 4) == []

    def test_a_prompt_beyond_the_window_is_not_read(self):
        tokenizer = byte_tokenizer()
        made, sequence = drafter(script(tokenizer, TEXT, 8), tokenizer, "bpe", prompt=[0] * 9)
        assert propose(made, 4) == []
        assert sequence.peak == 0

    def test_a_prompt_read_before_is_read_once(self):
        tokenizer = byte_tokenizer()
        made, sequence = drafter(script(tokenizer, TEXT), tokenizer, "bpe", prompt=list(range(50)))
        fed: list[int] = []
        forward = sequence.forward
        sequence.forward = lambda ids: fed.append(len(ids)) or forward(ids)
        for _ in range(5):
            made.commit(propose(made, 2))
        assert max(fed) <= 4


# -- the law ----------------------------------------------------------------------------------------------------

LETTERS = "ab"


def letters(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of words over a and b, in merges of two: another size and another segmentation for each list."""
    vocab = {token: i for i, token in enumerate([*LETTERS, *tokens, "<end>"])}
    merges = [(token[: len(token) // 2 or 1], token[len(token) // 2 or 1 :]) for token in tokens]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated") if not tokens else None
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


TARGET = letters(["ab", "ba"])  # a b ab ba <end>
DRAFTS = {"letters": letters([]), "pairs": letters(["aa", "ab", "bb"]), "longer": letters(["ab", "abab"])}


def table(size: int, seed: int) -> torch.Tensor:
    """Next-token probabilities [size, size], rather peaked; nobody says the end token, which is the last."""
    probs = np.random.default_rng(seed).dirichlet(np.full(size - 1, 0.7), size=size)
    return torch.tensor(np.pad(probs, ((0, 0), (0, 1))), dtype=torch.float32)


P = table(len(TARGET), 5)
DRAWS = 2500


def sampled_pairs(draft: str, rule: AcceptanceRule, warp: TokenWarp) -> tuple[np.ndarray, int]:
    """Counts of the first two tokens [V, V] of answers, and how many drafted tokens were kept."""
    theirs = DRAFTS[draft]
    model = Markov(table(len(theirs), 1))
    target = Markov(P)
    generator = torch.Generator().manual_seed(0)
    ours, other = Vocabulary(TARGET, len(TARGET)), Vocabulary(theirs, len(theirs))
    counts, kept = np.zeros((len(TARGET), len(TARGET))), 0
    for _ in range(DRAWS):
        made = RetokenizingDrafter(model.new_sequence(), [0], (), draft_vocabulary=other, target_vocabulary=ours)
        made.start()
        settings = DecodeSettings(warp, rule, FixedDraft("model", 3))
        emitted: list[int] = []
        for done in decode(target.new_sequence(), [0], {"model": made}, settings, StopRule(3), generator):
            emitted += done.token_ids
            kept += done.num_accepted
            if len(emitted) >= 2:
                break
        counts[emitted[0], emitted[1]] += 1
    return counts, kept


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("warp", [TokenWarp(1.0), TokenWarp(0.7, top_k=3)], ids=["plain", "filtered"])
def test_sampled_answers_follow_the_target(draft, warp):
    """First and second token, jointly, for drafters of other sizes and segmentations."""
    counts, kept = sampled_pairs(draft, AcceptanceRule("exact"), warp)
    probs = torch.stack([warp.scores(row[None]).softmax(-1)[0] for row in P.log()]).double().numpy()
    expected = probs[0][:, None] * probs
    assert len(DRAFTS[draft]) != len(TARGET) or draft == "letters" or DRAFTS[draft].get_vocab() != TARGET.get_vocab()
    assert kept > DRAWS / 20
    assert total_variation(counts.sum(1), expected.sum(1)) < tv_bound(len(TARGET), DRAWS)
    assert total_variation(counts.ravel(), expected.ravel()) < tv_bound(expected.size, DRAWS)


class Trusting(AcceptanceRule):
    """Keeps a draft token more often than its one-hot law says."""

    def _sampled(self, scores: torch.Tensor, proposal: Proposal, generator: torch.Generator) -> Verdict:
        flatter = torch.cat([scores[:-1] * 0.5, scores[-1:]])
        return super()._sampled(flatter, proposal, generator)


def test_a_wrong_acceptance_is_noticed():
    """Negative control: the same statistic, on an acceptance against another distribution, is beyond the bound."""
    counts, _ = sampled_pairs("pairs", Trusting("exact"), TokenWarp(1.0))
    probs = P.double().numpy()
    expected = probs[0][:, None] * probs
    assert total_variation(counts.ravel(), expected.ravel()) > tv_bound(expected.size, DRAWS)


# -- whole answers ----------------------------------------------------------------------------------------------

NEW = 48


def answer(target, prompt, drafters, controller, *, warp=None, seed=0) -> list[int]:
    sequence = target.new_sequence()
    sequence.prefill(prompt[:-1])
    for made in drafters.values():
        made.start()
    settings = DecodeSettings(warp or TokenWarp(), AcceptanceRule("exact"), controller)
    rounds = decode(sequence, prompt, drafters, settings, StopRule(NEW), torch.Generator().manual_seed(seed))
    return [token for done in rounds for token in done.token_ids]


@pytest.mark.parametrize("target_name", ["bytes", "bpe", "unigram first"])
@pytest.mark.parametrize("draft_name", ["bytes", "bpe", "unigram always"])
def test_greedy_is_plain_greedy(target_name, draft_name):
    """Random models over any pair of tokenizers, padded rows in both heads."""
    ours, theirs = TOKENIZERS[target_name](), TOKENIZERS[draft_name]()
    target = tiny(0, vocab_size=len(ours), head_rows=len(ours) + 7)
    draft = tiny(1, vocab_size=len(theirs), head_rows=len(theirs) + 30)
    prompt = list(range(5, 45))
    plain = answer(target, prompt, {}, FixedDraft())
    for controller in (FixedDraft("model", 1), FixedDraft("model", 4), Governor({"model": 0.1})):
        made = RetokenizingDrafter(
            draft.new_sequence(),
            prompt,
            (),
            draft_vocabulary=Vocabulary(theirs, draft.vocab_size),
            target_vocabulary=Vocabulary(ours, target.vocab_size),
        )
        assert answer(target, prompt, {"model": made}, controller) == plain


def engine_of(target_text: str, draft_text: str) -> rapid.Engine:
    """An engine of two scripted models, the target's tokens bytes, the drafter's BPE."""
    models = []
    for name, tokenizer, text in (("target", byte_tokenizer(), target_text), ("drafter", bpe_tokenizer(), draft_text)):
        end = tokenizer.convert_tokens_to_ids("<|im_start|>")  # the last one is the assistant's
        model = TextScript(tokenizer, "assistant\n" + text, prompt_end=end, window=4096)
        models.append((model, ModelInfo(name, model.window, model.vocab_size, model.eos_token_ids, 0, tokenizer)))
    (target, target_info), (draft, draft_info) = models
    return rapid.Engine(LocalBackend(target, draft, target_info, draft_info))


def asked(engine: rapid.Engine, method: str, gamma: int | str = 6, **options) -> rapid.Answer:
    session = engine.open(rapid.Document("No words of it."), retrieval=rapid.Retrieval("bm25"), reserve_tokens=900)
    sampling = rapid.Sampling(
        max_new_tokens=200, **{k: options.pop(k) for k in ("temperature", "seed") if k in options}
    )
    speculation = rapid.Speculation(method, num_draft_tokens=gamma, **options)
    return session.ask("Which words?", speculation=speculation, sampling=sampling)


class TestThroughAnEngine:
    @pytest.mark.parametrize("method", ["sd", "sd-full"])
    @pytest.mark.parametrize("gamma", [1, 3, 16, "auto"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_lossless(self, method, gamma, temperature):
        found = asked(engine_of(TEXT, TEXT), method, gamma, temperature=temperature)
        assert found.text == TEXT
        assert found.finish_reason == "stop"
        assert found.settings["lossless"]
        if gamma != "auto":
            assert found.stats.acceptance_rate > 0.9

    def test_a_drafter_that_says_something_else(self):
        found = asked(engine_of(TEXT, "The lamp was on the shore, and the owl 🦜 sang."), "sd")
        assert found.text == TEXT
        assert 0 < found.stats.acceptance_rate < 1

    @pytest.mark.parametrize("law", ["paper", "transfer"])
    def test_a_transfer_is_refused_in_one_line(self, law):
        engine = engine_of(TEXT, TEXT)
        with pytest.raises(VocabularyMismatch) as error:
            asked(engine, "rapid", law=law)
        assert "\n" not in str(error.value)
        assert "use eta 0" in str(error.value)
        assert "token 256 is '<s>' for the target" in str(error.value)

    @pytest.mark.parametrize("options", [{"eta": 0.0}, {"law": "exact"}, {"eta": 10.0, "law": "exact"}])
    def test_without_a_transfer_rapid_is_lossless_too(self, options):
        assert asked(engine_of(TEXT, TEXT), "rapid", **options).text == TEXT

    def test_the_bound_of_the_statistic_is_not_vacuous(self):
        assert tv_bound(len(TARGET) ** 2, DRAWS) < 0.1
        assert math.isclose(float(P.sum()), len(TARGET), rel_tol=1e-5)
