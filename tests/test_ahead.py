"""Drafting ahead: the same law, the same answers whatever the timing, nothing left over after a wrong guess."""

import random
import threading
import time

import pytest
import torch

import test_laws
from rapid.backends.base import GenerateRequest
from rapid.backends.reader import LocalReader
from rapid.decode.control import FixedDraft
from rapid.decode.governor import PLAIN, Choice
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.ahead import AheadDrafter
from rapid.drafting.model import ModelDrafter
from rapid.models.toy import Const, Script, tiny
from rapid.params import LAWS
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp

PROMPT = [5, 9, 2, 7, 1]


class Slow:
    """A sequence whose forward passes take a random time, and may fail; it counts how many run at once."""

    def __init__(self, sequence, most_s=0.0, fails_after=None):
        self._sequence, self._most_s, self._left = sequence, most_s, fails_after
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self._sequence, name)

    def _alone(self, call, *args):
        assert self._lock.acquire(blocking=False), "the sequence is used by two threads at once"
        try:
            time.sleep(random.random() * self._most_s)
            return call(*args)
        finally:
            self._lock.release()

    def forward(self, token_ids):
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("the device is gone")
        return self._alone(self._sequence.forward, token_ids)

    def rewind(self, length):
        self._alone(self._sequence.rewind, length)


def answer(target, draft, *, gamma=4, rule=None, warp=None, seed=0, max_new=40, ahead=True, slow=0.0, controller=None):
    """Token ids and rounds."""
    sequence = target.new_sequence()
    sequence.prefill(PROMPT[:-1])
    inner = ModelDrafter(Slow(draft.new_sequence(), slow), PROMPT[1:], draft.eos_token_ids)
    drafter = AheadDrafter(inner) if ahead else inner
    drafter.start()
    settings = DecodeSettings(warp or TokenWarp(), rule or AcceptanceRule(), controller or FixedDraft("model", gamma))
    stop = StopRule(max_new, target.eos_token_ids)
    generator = torch.Generator().manual_seed(seed)
    rounds = list(decode(Slow(sequence, slow), PROMPT, {"model": drafter}, settings, stop, generator))
    if ahead:
        drafter.close()
    return [t for r in rounds for t in r.token_ids], rounds


@pytest.mark.parametrize("gamma", [1, 2, 4, 10])
@pytest.mark.parametrize("draft", [0, 1], ids=["self", "another model"])
def test_greedy_answers_and_rounds_are_those_without_it(gamma, draft):
    """The same tokens, drafted and kept in the same rounds; with and without right guesses."""
    model, other = tiny(0), tiny(draft)
    plain, _ = answer(model, model, controller=FixedDraft())
    ahead, rounds = answer(model, other, gamma=gamma)
    _, expected = answer(model, other, gamma=gamma, ahead=False)
    assert ahead == plain
    assert [(r.num_drafted, r.num_accepted) for r in rounds] == [(r.num_drafted, r.num_accepted) for r in expected]


@pytest.mark.parametrize("law", LAWS)
def test_sampled_pairs_follow_the_law(law):
    rule = AcceptanceRule(law, 3.0)
    counts, kept = test_laws.sampled_pairs(rule, TokenWarp(1.0), 6000, drafter_class=closing(AheadDrafter))
    expected = test_laws.pair_law(law, 3.0, TokenWarp(1.0))
    assert test_laws.total_variation(counts.ravel(), expected.ravel()) < test_laws.tv_bound(9, 6000)
    assert kept[0] > 300


def closing(drafter_class):
    """Makers of drafters, each of which ends the one before: thousands of answers leave no threads."""
    last = []

    def make(*args, **options):
        while last:
            last.pop().close()
        last.append(drafter_class(ModelDrafter(*args, **options)))
        return last[0]

    return make


def block_counts(drafter_class, draws):
    """First tokens of a second block (length 1) whose first block (length 1) and guess came true, by the guess."""
    counts = torch.zeros(3, 3)
    generator = torch.Generator().manual_seed(1)
    make = closing(drafter_class)
    target, draft = test_laws.Markov(test_laws.TARGET_TABLE), test_laws.Markov(test_laws.DRAFT_TABLE)
    for _ in range(draws):
        drafter = make(draft.new_sequence(), [test_laws.START], ())
        drafter.start()
        settings = DecodeSettings(TokenWarp(1.0), AcceptanceRule("exact"), FixedDraft("model", 1))
        emitted = []
        for done in decode(
            target.new_sequence(), [test_laws.START], {"model": drafter}, settings, StopRule(4), generator
        ):
            emitted += done.token_ids
            if len(emitted) == 2 and done.num_accepted == 1:
                proposal = drafter.propose(1, TokenWarp(1.0), generator, need_probs=True)
                counts[emitted[1], proposal.token_ids[0]] += 1
            break
    return counts


class PrefersLuckyGuesses(AheadDrafter):
    """Throws away a block drafted ahead that does not begin with token 0: a choice that looks at the tokens."""

    def _drafted_ahead(self, num_tokens):
        made = super()._drafted_ahead(num_tokens)
        if made.token_ids[:1] == [0]:
            return made
        self._inner.commit([])
        return type(made)([])


@pytest.mark.parametrize(("drafter_class", "lawful"), [(AheadDrafter, True), (PrefersLuckyGuesses, False)])
def test_a_block_drafted_ahead_follows_q(drafter_class, lawful):
    """Given the text before it, the next block is drawn from q, also where a right guess put it there."""
    counts = block_counts(drafter_class, 6000)
    q = test_laws.DRAFT_TABLE
    off = [
        test_laws.total_variation(row.numpy(), q[token].double().numpy()) - test_laws.tv_bound(3, int(row.sum()))
        for token, row in enumerate(counts)
        if row.sum() > 200
    ]
    assert off
    assert (max(off) < 0) == lawful


def test_an_answer_does_not_depend_on_timing():
    model = tiny(0)
    warp, rule = TokenWarp(1.0), AcceptanceRule("transfer", 5.0)
    answers = {tuple(answer(model, tiny(1), warp=warp, rule=rule, seed=3, slow=s)[0]) for s in (0, 0.002, 0.004)}
    assert len(answers) == 1


class TakesTurns:
    """Drafts in some rounds and not in others, with all lengths."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def choose(self, remaining, outlooks):
        return PLAIN if self._random.random() < 0.4 else Choice("model", self._random.randint(1, 6))

    def observe(self, *args):
        pass

    def explain(self):
        return {}


@pytest.mark.parametrize("seed", range(8))
def test_rounds_that_somebody_else_drafted_or_nobody(seed):
    """A guess came true, and the next round is a plain one: its block is old then."""
    model = tiny(0)
    plain, _ = answer(model, model, controller=FixedDraft(), max_new=60)
    for draft in (tiny(0), tiny(1)):
        assert answer(model, draft, controller=TakesTurns(seed), max_new=60, slow=0.001)[0] == plain


def test_drafting_and_verifying_overlap():
    """Both sides sleep: with everything accepted a round takes the longer of the two, not their sum."""
    script = list(range(1, 15)) * 4
    model = Script(script, vocab_size=16, eos_token_ids=(0,))

    class Sleeps(Slow):
        def forward(self, token_ids):
            time.sleep(0.01)
            return self._sequence.forward(token_ids)

    def seconds(wrap):
        sequence = Sleeps(model.new_sequence())
        sequence.prefill(script[:4])
        drafter = wrap(ModelDrafter(Sleeps(model.new_sequence()), script[:5], (0,)))
        drafter.start()
        settings = DecodeSettings(TokenWarp(), AcceptanceRule(), FixedDraft("model", 1))
        start = time.perf_counter()
        rounds = list(decode(sequence, script[:5], {"model": drafter}, settings, StopRule(40, ()), torch.Generator()))
        assert [t for r in rounds for t in r.token_ids] == script[5:45]
        return time.perf_counter() - start

    alone, ahead = seconds(lambda inner: inner), seconds(AheadDrafter)
    # 20 rounds of 2 passes of the drafter's against one of the target's: 30 in all, or 20.
    assert alone > 0.39
    assert ahead < alone + 0.1  # a busy machine: that they run at the same time is what the next test shows


def test_the_drafter_runs_while_the_target_does():
    """The target's forward pass waits until the drafter has run again: without overlap it would wait in vain."""
    ran = threading.Event()
    model = Const([0.1, 0.9])

    class Draft(Slow):
        def forward(self, token_ids):
            if len(self._sequence.token_ids) >= len(PROMPT):
                ran.set()
            return self._sequence.forward(token_ids)

    class Target(Slow):
        def forward(self, token_ids):
            assert ran.wait(10)
            return self._sequence.forward(token_ids)

    drafter = AheadDrafter(ModelDrafter(Draft(model.new_sequence()), PROMPT, ()))
    drafter.start()
    target = model.new_sequence()
    target.prefill(PROMPT[:-1])
    settings = DecodeSettings(TokenWarp(), AcceptanceRule(), FixedDraft("model", 1))
    next(decode(Target(target), PROMPT, {"model": drafter}, settings, StopRule(9, ()), torch.Generator()))
    drafter.close()


@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_drafter_that_fails_says_so(after):
    model = tiny(0)
    drafter = AheadDrafter(ModelDrafter(Slow(model.new_sequence(), fails_after=after), PROMPT, ()))
    drafter.start()
    target = model.new_sequence()
    target.prefill(PROMPT[:-1])
    settings = DecodeSettings(TokenWarp(), AcceptanceRule(), FixedDraft("model", 3))
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(decode(target, PROMPT, {"model": drafter}, settings, StopRule(40, ()), torch.Generator()))


@pytest.mark.parametrize("after", [4, 5, 6, 7, 8])
def test_a_failure_is_reported_once(after):
    """The question after a drafter's failure is answered, wherever in a block it came."""
    model = tiny(0)
    expected = [t for r in LocalReader(model, model).generate(request()).rounds for t in r.token_ids]
    reader = LocalReader(model, Elsewhere(model))
    sequence, reader._drafting = reader._drafting, Slow(reader._drafting, fails_after=after)
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(reader.generate(request(draft_prompt=PROMPT)).rounds)
    reader._drafting = sequence
    assert [t for r in reader.generate(request()).rounds for t in r.token_ids] == expected


class Elsewhere:
    """A model that says it is on another device."""

    device = "elsewhere"

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)


def request(**changes):
    given = {
        "target_prompt": PROMPT, "draft_prompt": PROMPT[1:], "reads": "document", "drafters": ("model",),
        "num_draft_tokens": 4, "warp": TokenWarp(), "rule": AcceptanceRule(), "stop": StopRule(30, ()), "seed": 0,
    }  # fmt: skip
    return GenerateRequest(**(given | changes))


def test_a_reader_drafts_ahead_on_another_device_only():
    model = tiny(0)
    with_others = LocalReader(model, Elsewhere(tiny(1)))
    generation = with_others.generate(request())
    assert isinstance(with_others._ahead, AheadDrafter)
    tokens = [t for r in generation.rounds for t in r.token_ids]
    assert with_others._ahead is None
    here = LocalReader(model, tiny(1))
    assert [t for r in here.generate(request()).rounds for t in r.token_ids] == tokens
    assert here._ahead is None


def test_an_answer_left_half_way_stops_drafting():
    """The next question's drafter finds the sequence idle; so does one that forgets everything."""
    model = tiny(0)
    reader = LocalReader(model, Elsewhere(tiny(1)))
    expected = [t for r in reader.generate(request()).rounds for t in r.token_ids]
    for _ in range(5):
        rounds = reader.generate(request()).rounds
        next(rounds)
        next(rounds)
        if random.random() < 0.5:
            reader.forget()
        assert [t for r in reader.generate(request()).rounds for t in r.token_ids] == expected
    assert not [t for t in threading.enumerate() if t.name.startswith("rapid-ahead")]
