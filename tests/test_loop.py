"""The decode loop on models whose every answer is known: limits, ends, windows, seeds, counters, failures."""

from dataclasses import replace

import pytest
import torch

from rapid.decode.control import FixedDraft
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.model import ModelDrafter, shared_prefix
from rapid.errors import InvalidLogits, InvalidParameter
from rapid.models.base import LanguageModel
from rapid.models.toy import Const, Markov, Script, tiny
from rapid.params import LAWS, Sampling
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp
from rapid.types import Proposal, Round

PROMPT = [1, 2, 3, 2, 1]
GREEDY = TokenWarp()


class Run:
    """One request: everything `decode` needs, and what came of it."""

    def __init__(self, target: LanguageModel, draft: LanguageModel | None = None, **options):
        prompt = list(options.get("prompt", PROMPT))
        draft_prompt = list(options.get("draft_prompt", prompt))
        warp, rule = options.get("warp", GREEDY), options.get("rule", AcceptanceRule())
        self.target = target.new_sequence()
        self.target.prefill(prompt[:-1])
        self.draft = draft.new_sequence() if draft else None
        drafter = options.get("drafter")
        if self.draft is not None:
            drafter = ModelDrafter(self.draft, draft_prompt, draft.eos_token_ids)
            drafter.start()
        stop = StopRule(options.get("max_new", 40), target.eos_token_ids, options.get("should_stop"))
        settings = DecodeSettings(warp, rule, FixedDraft("model", options.get("gamma", 4)))
        generator = torch.Generator().manual_seed(options.get("seed", 0))
        self.rounds: list[Round] = list(
            decode(self.target, prompt, {"model": drafter} if drafter else {}, settings, stop, generator)
        )
        self.token_ids = [t for r in self.rounds for t in r.token_ids]
        self.drafted = sum(r.num_drafted for r in self.rounds)
        self.accepted = sum(r.num_accepted for r in self.rounds)
        self.finish_reason = self.rounds[-1].finish_reason
        # True of every run: rounds are never empty, only the last has a reason, and the counts add up.
        assert all(r.token_ids for r in self.rounds)
        assert all(r.finish_reason is None for r in self.rounds[:-1])
        assert self.finish_reason in ("stop", "length")
        for r in self.rounds:
            assert 0 <= r.num_accepted <= r.num_drafted <= options.get("gamma", 4)
            assert r.num_accepted <= len(r.token_ids) <= r.num_accepted + 1
            assert r.draft_s >= 0
            assert r.verify_s >= 0
        assert all(len(r.token_ids) == r.num_accepted + 1 for r in self.rounds[:-1])
        # The cache holds the prompt and what was emitted, at most the last token is still to be read.
        text = prompt + self.token_ids
        assert list(self.target.token_ids) in (text, text[:-1])


def script(token_ids, window=256, eos=(0,), vocab_size=16):
    return Script(token_ids, vocab_size=vocab_size, eos_token_ids=eos, window=window)


def markov(seed: int, size: int = 8, **options) -> Markov:
    logits = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 1.5
    return Markov(logits.softmax(-1), **options)


# --- limits (B03) ----------------------------------------------------------------------------------------------

LONG = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] * 2


@pytest.mark.parametrize("gamma", [0, 1, 8, 128])
@pytest.mark.parametrize("max_new", [1, 2, 7, 8, 9, 10, 18])
@pytest.mark.parametrize("tight", [False, True])
def test_exactly_max_new_tokens(max_new, gamma, tight):
    window = len(PROMPT) + max_new if tight else 256
    run = Run(script(LONG, window), script(LONG, window), max_new=max_new, gamma=gamma)
    assert run.token_ids == LONG[:max_new]
    assert run.finish_reason == "length"
    assert run.target.peak <= window
    assert run.draft.peak <= window
    # Every draft was the script: all kept, and none beyond the limit was drafted.
    assert run.drafted == run.accepted
    assert run.drafted + len(run.rounds) == max_new


@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
@pytest.mark.parametrize("room", [0, 1, 2, 5, 9])
def test_a_full_window_ends_the_answer(room, gamma):
    """Nothing is fed at a position >= window, and the last token may still be emitted without being read."""
    window = len(PROMPT) + room
    run = Run(script(LONG, window), script(LONG, window), gamma=gamma)
    assert run.token_ids == LONG[: room + 1]
    assert run.finish_reason == "length"
    assert run.target.peak == window


@pytest.mark.parametrize("value", [0, -1, None, "5", 1.5, True])
def test_a_limit_that_is_no_positive_whole_number_is_an_error(value):
    """B13: never taken for "not given"."""
    with pytest.raises(InvalidParameter, match="max_new_tokens must be"):
        Sampling(max_new_tokens=value)


# --- end tokens and other ends (B07) ---------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 4, 8])
def test_stops_at_an_end_token_inside_a_draft(gamma):
    ids = [3, 4, 9, 5, 5, 5]
    run = Run(script(ids, eos=(7, 9)), script(ids, eos=(7, 9)), gamma=gamma)
    assert run.token_ids == [3, 4, 9]
    assert run.finish_reason == "stop"
    assert run.drafted <= 3  # the drafter stops at the end token as well


@pytest.mark.parametrize("gamma", [3, 4, 8])
def test_a_drafter_with_other_end_tokens_does_not_run_over(gamma):
    ids = [3, 4, 9, 5, 5, 5]
    run = Run(script(ids, eos=(7, 9)), script(ids, eos=(7,)), gamma=gamma)
    assert run.token_ids == [3, 4, 9]
    assert run.finish_reason == "stop"
    assert run.accepted == min(gamma, 3)  # what was drafted after the end does not count as accepted


def test_an_end_token_at_the_limit_is_a_stop():
    assert Run(script([3, 4], eos=(9,)), script([3, 4], eos=(9,)), max_new=3).finish_reason == "stop"
    assert Run(script([3, 4, 5], eos=(9,)), script([3, 4, 5], eos=(9,)), max_new=3).finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_a_stop_function_sees_every_token_in_order(gamma):
    seen = []

    def at_the_second_five(token_ids):
        seen.append(list(token_ids))
        return list(token_ids).count(5) == 2

    ids = [3, 5, 4, 5, 6, 7, 8]
    run = Run(script(ids), script(ids), gamma=gamma, should_stop=at_the_second_five)
    assert run.token_ids == [3, 5, 4, 5]
    assert run.finish_reason == "stop"
    assert seen == [ids[: n + 1] for n in range(4)]


# --- drafts of all kinds ---------------------------------------------------------------------------------------


def test_the_same_script_accepts_everything():
    run = Run(script(LONG), script(LONG), gamma=4, max_new=20)
    assert run.token_ids == LONG[:20]
    assert (run.accepted, run.drafted) == (16, 16)
    assert [len(r.token_ids) for r in run.rounds] == [5, 5, 5, 5]


def test_another_script_accepts_nothing():
    run = Run(script([4, 5, 6]), script([7, 8, 9, 10, 11, 12]), gamma=4)
    assert run.token_ids == [4, 5, 6, 0]
    assert run.accepted == 0


def test_no_drafter_is_plain_decoding():
    run = Run(script([4, 5, 6]))
    assert [r.token_ids for r in run.rounds] == [[4], [5], [6], [0]]
    assert run.drafted == 0


class FixedDrafter:
    """Proposes the same certain tokens, or none, every round."""

    def __init__(self, *drafts):
        self.drafts, self.committed = list(drafts), []

    def start(self, progress=None):
        pass

    def propose(self, num_tokens, warp, generator, *, need_probs):
        return Proposal((self.drafts.pop(0) if self.drafts else [])[:num_tokens])

    def commit(self, token_ids):
        self.committed += token_ids


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("warp", [GREEDY, TokenWarp(1.0)])
def test_proposals_may_be_empty_or_short_or_certain(law, warp):
    drafter = FixedDrafter([], [4, 5], [], [9, 9, 9], [7])
    run = Run(script(range(3, 12)), drafter=drafter, rule=AcceptanceRule(law, 5.0), warp=warp)
    assert run.token_ids == [*range(3, 12), 0]
    assert drafter.committed == run.token_ids
    assert [r.num_accepted for r in run.rounds[:5]] == [0, 2, 0, 0, 0]


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("draft_seed", [0, 1])
def test_greedy_markov_equals_plain(gamma, draft_seed):
    plain = Run(markov(0, eos_token_ids=[7]))
    run = Run(markov(0, eos_token_ids=[7]), markov(draft_seed, eos_token_ids=[7]), gamma=gamma)
    assert run.token_ids == plain.token_ids
    assert run.finish_reason == plain.finish_reason


# --- the drafter's window (B18) --------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_prompt_length", [1, 60, 63, 64, 65, 80])
def test_a_drafter_with_a_shorter_window(draft_prompt_length):
    target, draft = markov(0, window=256), markov(1, window=64)
    options = {"draft_prompt": [1] * draft_prompt_length, "max_new": 40}
    run = Run(target, draft, **options)
    assert run.token_ids == Run(target, max_new=40).token_ids
    assert run.draft.peak <= 64
    if draft_prompt_length > 64:
        assert run.drafted == 0
    else:
        assert run.drafted > 0


# --- randomness (B14) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
def test_seeds(law):
    target, draft = Const([0.5, 0.3, 0.2]), Const([0.2, 0.3, 0.5])

    def ids(seed):
        run = Run(target, draft, prompt=[0], warp=TokenWarp(1.0), rule=AcceptanceRule(law, 2.0), seed=seed)
        return run.token_ids

    before = torch.get_rng_state()
    assert ids(7) == ids(7)
    assert len({tuple(ids(seed)) for seed in (7, 8, 9)}) == 3
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert ids(7) == ids(7)


# --- the drafter's cache ---------------------------------------------------------------------------------------


class CheckedDrafter(ModelDrafter):
    """Compares, before each round, its cached reading with a fresh one of the same text: the slow twin."""

    def __init__(self, model, prompt):
        self.fresh, self.text, self.rounds = model, list(prompt), 0
        super().__init__(model.new_sequence(), prompt, ())

    def propose(self, num_tokens, warp, generator, *, need_probs):
        known = list(self._sequence.token_ids)
        assert known == self.text[: len(known)]
        assert len(known) < len(self.text)
        logits = self._sequence.forward(self.text[len(known) :])[-1]
        torch.testing.assert_close(logits, self.fresh.new_sequence().forward(self.text)[-1], atol=5e-4, rtol=5e-4)
        self._sequence.rewind(len(known))
        self.rounds += 1
        return super().propose(num_tokens, warp, generator, need_probs=need_probs)

    def commit(self, token_ids):
        self.text += token_ids
        super().commit(token_ids)


@pytest.mark.parametrize("warp", [GREEDY, TokenWarp(1.5)])
def test_the_drafters_cache_survives_rejections(warp):
    """Sampled with some acceptance and some rejection, every round starts from the text as emitted."""
    drafter = CheckedDrafter(tiny(0), [5, 6, 7, 8])
    run = Run(tiny(0), drafter=drafter, prompt=[5, 6, 7, 9], warp=warp, max_new=60)
    assert drafter.rounds > 10
    assert 0 < run.accepted < run.drafted


def test_start_reuses_what_an_earlier_reading_shares():
    model = script(LONG)
    sequence = model.new_sequence()
    sequence.prefill([1, 2, 3, 4])
    read = []
    sequence.prefill, prefill = lambda ids, progress=None: (read.extend(ids), prefill(ids)), sequence.prefill
    drafter = ModelDrafter(sequence, [1, 2, 9, 9, 9], ())
    drafter.start()
    assert read == [9, 9]
    assert sequence.token_ids == [1, 2, 9, 9]


@pytest.mark.parametrize(
    ("emitted", "kept"),
    [([4], 5), ([4, 5], 6), ([4, 5, 6, 7, 8], 8), ([9, 9, 9], 5), ([4, 9, 6, 7], 6)],
)
def test_commit_keeps_what_was_drafted_and_emitted(emitted, kept):
    """Also where another drafter's tokens were emitted: the cache never holds what is not in the text."""
    drafter = ModelDrafter(sequence := script(LONG).new_sequence(), PROMPT, ())
    drafter.start()
    drafter.propose(4, GREEDY, torch.Generator(), need_probs=False)
    assert sequence.token_ids == [*PROMPT, 4, 5, 6]
    drafter.commit(emitted)
    text = PROMPT + emitted
    assert sequence.token_ids == text[: len(sequence.token_ids)]
    assert sequence.length == min(kept, len(text) - 1)


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([1], [2], 0)],
)
def test_shared_prefix(first, second, length):
    assert shared_prefix(first, second) == length


# --- failures (kin of B20) -------------------------------------------------------------------------------------


def fail_in_the_last_layer(model, number):
    """Its pass of that number fails there, after the other layer has written its cache; by either forward pass."""
    calls = []

    def count(*args):
        calls.append(1)
        if len(calls) == number:
            raise RuntimeError("out of memory")

    if model._short_blocks is None:
        return model.model.model.layers[-1].register_forward_pre_hook(count).remove
    last = model._short_blocks.layers[-1]
    failing = replace(last, out=lambda x: count() or last.out(x))
    model._short_blocks.layers[-1] = failing
    return lambda: model._short_blocks.layers.__setitem__(-1, last)


@pytest.mark.parametrize("short_blocks", [False, True])
def test_a_failure_inside_the_target_leaves_the_sequence_usable(short_blocks):
    """The third pass fails: the next request is as new."""
    model = tiny(0, short_blocks=short_blocks)
    expected = Run(model, tiny(1), max_new=12).token_ids
    sequence = model.new_sequence()
    settings = DecodeSettings(GREEDY, AcceptanceRule(), FixedDraft("model", 4))

    def answer(sequence):
        keep = shared_prefix(sequence.token_ids, PROMPT[:-1])
        sequence.rewind(keep)
        sequence.prefill(PROMPT[keep:-1])
        drafter = ModelDrafter(tiny(1).new_sequence(), PROMPT, ())
        drafter.start()
        rounds = decode(sequence, PROMPT, {"model": drafter}, settings, StopRule(12), torch.Generator())
        return [t for r in rounds for t in r.token_ids]

    for _ in range(3):
        restore = fail_in_the_last_layer(model, 3)
        with pytest.raises(RuntimeError, match="out of memory"):
            answer(sequence)
        restore()
        assert answer(sequence) == expected


@pytest.mark.parametrize("short_blocks", [False, True])
def test_a_pass_that_failed_half_way_can_be_repeated(short_blocks):
    model = tiny(0, short_blocks=short_blocks)
    sequence = model.new_sequence()
    sequence.prefill(PROMPT)
    for read in (sequence.forward, sequence.prefill):
        restore = fail_in_the_last_layer(model, 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            read([7, 8])
        restore()
    assert sequence.token_ids == PROMPT
    torch.testing.assert_close(sequence.forward([7, 8]), model.new_sequence().forward([*PROMPT, 7, 8])[-2:])


def test_a_closed_stream_leaves_a_consistent_cache():
    model = tiny(0)
    sequence = model.new_sequence()
    sequence.prefill(PROMPT[:-1])
    drafter = ModelDrafter(tiny(1).new_sequence(), PROMPT, ())
    drafter.start()
    rounds = decode(
        sequence,
        PROMPT,
        {"model": drafter},
        DecodeSettings(GREEDY, AcceptanceRule(), FixedDraft("model", 4)),
        StopRule(50),
        torch.Generator(),
    )
    emitted = next(rounds).token_ids + next(rounds).token_ids
    rounds.close()
    assert sequence.token_ids == (PROMPT + emitted)[:-1]


@pytest.mark.parametrize("bad", ["target", "draft"])
@pytest.mark.parametrize("warp", [GREEDY, TokenWarp(1.0)])
def test_unusable_logits_end_the_request_with_a_clear_error(bad, warp):
    good = Const([0.5, 0.5])
    for row in ([0.5, torch.nan], [0.0, 0.0]):
        broken = Const(row)
        with pytest.raises(InvalidLogits, match="NaN"):
            Run(*((broken, good) if bad == "target" else (good, broken)), prompt=[0], warp=warp)


# --- the toys themselves ---------------------------------------------------------------------------------------


def test_script_restarts_where_the_text_leaves_it():
    model = script([4, 4, 5])
    nexts = [int(row.argmax()) for row in model.new_sequence().forward([1, 4, 4, 5, 9, 4])]
    assert nexts == [4, 4, 5, 0, 4, 4]


def test_tiny_is_the_same_for_the_same_seed():
    before = torch.get_rng_state()
    one, two, other = (tiny(seed).new_sequence().forward(PROMPT) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.allclose(one, other)
    assert torch.equal(torch.get_rng_state(), before)
