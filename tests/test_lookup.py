"""The lookup drafter against a naive search, the cascade, and where one-hot drafts are refused."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.backends.reader import LocalReader
from rapid.drafting.base import MODEL_OUTLOOK, outlooks
from rapid.drafting.cascade import CascadeDrafter
from rapid.drafting.lookup import KEPT_AFTER_MATCH, LookupDrafter, LookupIndex, SuffixAutomaton
from rapid.errors import InvalidParameter
from rapid.models.toy import Script
from rapid.params import Speculation
from rapid.sampling.warp import TokenWarp
from rapid.types import Proposal

GREEDY = TokenWarp()
TEXT = st.lists(st.integers(0, 3), max_size=40)


def ends(text, suffix):
    """Where `suffix` ends in `text`, by index of its last token."""
    n = len(suffix)
    return [i for i in range(n - 1, len(text)) if text[i - n + 1 : i + 1] == suffix]


def naive_lookup(document, context, output, num_tokens, min_match, eos=()):
    """The definition, by search over everything: the slow twin of `LookupDrafter.lookup`."""
    recent = [*context, None, *output]
    in_document = in_recent = 0
    for n in range(1, len(output) + 1):
        suffix = output[-n:]
        if any(end + 1 < len(document) for end in ends(document, suffix)):
            in_document = n
        if any(end + 1 < len(recent) for end in ends(recent, suffix)):
            in_recent = n
    draft: list[tuple[int, tuple[str, int]]] = []
    if in_document >= min_match:
        matched = output[-in_document:]
        while len(draft) < num_tokens:
            found = [end for end in ends(document, matched) if end + 1 < len(document)]
            if not found:
                break
            counts = Counter(document[end + 1] for end in found)
            latest = {document[end + 1]: end for end in found}
            token = max(counts, key=lambda t: (counts[t], latest[t]))
            draft.append((token, ("sole" if len(counts) == 1 else "likely", min(len(matched), 8))))
            matched = [*matched, token]
    if in_recent >= min_match:
        copied = list(recent)
        copy: list[tuple[int, tuple[str, int]]] = []
        position = min(end for end in ends(recent, output[-in_recent:]) if end + 1 < len(recent)) + 1
        while len(copy) < num_tokens and copied[position] is not None:
            copy.append((copied[position], ("recent", min(in_recent + len(copy), 8))))
            copied.append(copied[position])
            position += 1
        if copy and (not draft or chance(copy) >= chance(draft)):
            draft = copy
    stops = [i for i, (token, _) in enumerate(draft) if token in eos]
    return draft[: stops[0] + 1] if stops else draft


def chance(draft):
    place, length = draft[0][1]
    return KEPT_AFTER_MATCH[place][length - 1]


@settings(max_examples=400, deadline=None)
@given(TEXT, st.lists(st.integers(0, 3), max_size=8), TEXT, st.integers(1, 6), st.integers(1, 3))
def test_lookup_is_the_naive_search(document, context, output, num_tokens, min_match):
    drafter = LookupDrafter(LookupIndex(document), [3], context=context, min_match=min_match)
    for n in range(len(output) + 1):
        expected = naive_lookup(document, context, output[:n], num_tokens, min_match, eos=(3,))
        assert drafter.lookup(num_tokens) == [token for token, _ in expected]
        assert [prior.kind for prior in drafter.outlook(num_tokens)] == [kind for _, kind in expected]
        drafter.commit(output[n : n + 1])


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_automaton_accepts_the_substrings_and_nothing_else(text):
    automaton = SuffixAutomaton(text)
    substrings = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    paths, stack = set(), [((), 0)]
    while stack:
        path, state = stack.pop()
        for token, following in automaton.next[state].items():
            paths.add((*path, token))
            stack.append(((*path, token), following))
            assert automaton.first_end[following] == ends(text, [*path, token])[0]
    assert paths == substrings


def test_examples_by_hand():
    """Words as tokens: what followed the longest match more often, then what was seen last."""
    text = "the red fox ran . a red fox sat . the red fox sat ."
    document = text.split()
    words = sorted(set(document))
    ids = [words.index(w) for w in document]
    drafter = LookupDrafter(LookupIndex(ids), [])
    assert drafter.lookup(5) == []
    drafter.commit([words.index("red"), words.index("fox")])
    assert [words[i] for i in drafter.lookup(3)] == ["sat", ".", "the"]


def test_a_short_match_in_the_output_beats_a_longer_one_in_the_document():
    """By how often either was right: two tokens repeated by the answer itself, against three in the document."""
    drafter = LookupDrafter(LookupIndex([1, 2, 3, 4, 5, 6]), [])
    drafter.commit([2, 3, 9, 1, 2, 3])
    assert drafter.lookup(1) == [9]
    drafter = LookupDrafter(LookupIndex([1, 2, 3, 4, 5, 6]), [], min_match=1)
    drafter.commit([3, 9, 1, 2, 3])
    assert drafter.lookup(1) == [4]


def test_chances_rise_with_the_length_of_the_match():
    for shares in KEPT_AFTER_MATCH.values():
        assert list(shares) == sorted(shares)


def test_index_is_shared_and_never_changed():
    index = LookupIndex([1, 2, 3, 4, 1, 2, 5])
    before = [dict(n) for n in index.automaton.next]
    first, second = LookupDrafter(index, []), LookupDrafter(index, [])
    first.commit([1, 2, 9, 9, 9])
    second.commit([3, 4])
    assert second.lookup(2) == [1, 2]
    assert first.lookup(2) == [9, 9]
    assert index.automaton.next == before


def test_a_period_goes_on():
    drafter = LookupDrafter(LookupIndex([]), [])
    drafter.commit([7, 8, 7, 8, 7, 8])
    assert drafter.lookup(5) == [7, 8, 7, 8, 7]


def test_proposals_are_certain_and_stop_at_the_end_token():
    drafter = LookupDrafter(LookupIndex([1, 2, 3, 0, 4, 5]), [0])
    drafter.commit([1, 2])
    proposal = drafter.propose(4, GREEDY, torch.Generator(), need_probs=True)
    assert proposal == Proposal([3, 0], None)
    with pytest.raises(InvalidParameter, match="min_match"):
        LookupDrafter(LookupIndex([]), [], min_match=0)


@pytest.mark.parametrize("kind", ["random", "one token", "period"])
def test_128k_tokens_take_seconds_to_index_and_microseconds_to_follow(kind):
    generator = torch.Generator().manual_seed(0)
    n = 131_072
    document = {
        "random": lambda: torch.randint(0, 50, (n,), generator=generator).tolist(),
        "one token": lambda: [1] * n,
        "period": lambda: [i % 1000 for i in range(n)],
    }[kind]()
    start = time.process_time()
    index = LookupIndex(document)
    assert time.process_time() - start < 10
    assert len(index.automaton.next) <= 2 * n
    drafter = LookupDrafter(index, [])
    start = time.process_time()
    for position in range(60_000, 64_000):
        drafter.commit([document[position]])
        drafter.lookup(8)
    assert (time.process_time() - start) / 4000 < 1e-3
    assert drafter.lookup(8) == document[64_000:64_008]


@pytest.mark.parametrize("options", [{"method": "lookup"}, {"method": "sd"}])
def test_one_hot_drafts_are_for_lossless_answers(options):
    assert Speculation(**options).lossless
    with pytest.raises(InvalidParameter, match="is eta 0"):
        Speculation(**options, eta=5)


class Recorder:
    """A drafter that always proposes the same token and writes down what it was told."""

    def __init__(self, token):
        self.token, self.started, self.emitted, self.asked = token, 0, [], 0

    def start(self, progress=None):
        self.started += 1

    def propose(self, num_tokens, warp, generator, *, need_probs):
        self.asked += 1
        return Proposal([self.token] * num_tokens, torch.ones(num_tokens, 1) if need_probs else None)

    def commit(self, token_ids):
        self.emitted += token_ids


def test_cascade_asks_the_lookup_first_and_keeps_the_model_posted():
    model = Recorder(99)
    lookup = LookupDrafter(LookupIndex([1, 2, 3, 4]), [])
    cascade = CascadeDrafter({"lookup": lookup, "model": model})
    cascade.start()
    assert model.started == 1
    generator = torch.Generator()
    assert outlooks(cascade.drafters) == {"model": MODEL_OUTLOOK}
    from_model = cascade.propose(2, GREEDY, generator, need_probs=True)
    assert from_model.token_ids == [99, 99]
    assert from_model.probs is not None
    cascade.commit([1, 2])
    assert outlooks(cascade.drafters).keys() == {"lookup", "model"}
    assert cascade.propose(2, GREEDY, generator, need_probs=True) == Proposal([3, 4], None)
    assert model.asked == 1
    cascade.commit([3])
    assert model.emitted == [1, 2, 3]
    with pytest.raises(InvalidParameter):
        CascadeDrafter({})


def test_an_earlier_question_is_no_part_of_the_document():
    """Its words are not proposed to the next one; the document's are, by an index that is then made no more."""
    document, first, second = [*range(10, 40), *range(10, 40)], [90, 91, 92, 93], [80, 81]
    model = Script([1], vocab_size=100, eos_token_ids=(0,))
    reader = LocalReader(model, model)

    def proposed(question, *output):
        drafter = reader._lookup_drafter([*document, *question])
        drafter.commit(output)
        return drafter.propose(2, TokenWarp(), torch.Generator(), need_probs=False).token_ids

    assert proposed(first, 90, 91) == [92, 93]
    assert proposed(second, 90, 91) == []
    index = reader._lookup[1]
    assert proposed(second, 12, 13) == [14, 15]
    assert proposed(first, 90, 91) == [92, 93]
    assert reader._lookup[1] is index
