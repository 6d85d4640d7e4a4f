"""Drafting without a model: propose what followed the last tokens where they stood before.

Answers repeat the document, the question and themselves. Of every text a suffix automaton is kept: the smallest
machine whose paths are the substrings of the text (Blumer et al. 1985). Following the output through it keeps
the longest suffix match at hand in amortised constant time per token, at any length of the document.

The document's automaton is built once (a third of a second and 60-90 MB at 128K tokens, in plain Python) and
shared, unchanged, by all its questions; a small one of the question and the output grows with each answer. So an
occurrence across the seam of document and question is not seen.

Every token proposed is certain (q is one-hot), which is exact under the law `exact` only; `rapid.params` sees to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from rapid.drafting.base import Prior
from rapid.errors import InvalidParameter
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.models.base import ProgressFn
    from rapid.sampling.warp import Warp

# Shortest match worth a draft of fixed length.
MIN_MATCH = 2
# Share of tokens that were what the model wrote next, by the length of the match before them (1 to 8 and longer): in
# the question and the output itself; in the document where nothing else ever follows the match; and where other
# tokens do as well. SmolLM2-135M on 181 items of QA and summaries, 12,587 tokens; those of Qwen2.5-Coder-0.5B on 11
# items were kept rather more often.
KEPT_AFTER_MATCH = {
    "recent": (0.30, 0.57, 0.70, 0.77, 0.80, 0.85, 0.88, 0.92),
    "sole": (0.16, 0.27, 0.38, 0.50, 0.55, 0.68, 0.75, 0.75),
    "likely": (0.10, 0.16, 0.16, 0.24, 0.30, 0.40, 0.50, 0.50),
}
# Observations those shares count for.
PRIOR_WEIGHT = 8.0
# Between question and output: no token id, so no match crosses it.
SEPARATOR = -1


class SuffixAutomaton:
    """All substrings of a growing token sequence.

    State 0 is the empty string. A state stands for the substrings that end at the same places; `lengths` is the
    longest of them, `links` the state of its longest suffix that also ends elsewhere, `first_end` the
    index of the last token of its first occurrence, `next` what may follow.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]
        self.first_end = [-1]
        self.last = 0  # the state of the whole sequence
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Extend the sequence by one token, in amortised constant time."""
        following, links, lengths = self.next, self.links, self.lengths
        new = self._add({}, lengths[self.last] + 1, 0, lengths[self.last])
        state = self.last
        while state != -1 and token_id not in following[state]:
            following[state][token_id] = new
            state = links[state]
        if state != -1:
            target = following[state][token_id]
            if lengths[target] != lengths[state] + 1:
                # `target` also holds longer strings, which do not end here: split the shorter ones off.
                clone = self._add(following[target].copy(), lengths[state] + 1, links[target], self.first_end[target])
                while state != -1 and following[state].get(token_id) == target:
                    following[state][token_id] = clone
                    state = links[state]
                links[target] = target = clone
            links[new] = target
        self.last = new

    def step(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """The longest match after one more token, from the longest match (its state and length) before."""
        while state and token_id not in self.next[state]:
            state = self.links[state]
            length = self.lengths[state]
        following = self.next[state].get(token_id)
        return (0, 0) if following is None else (following, length + 1)

    def _add(self, following: dict[int, int], length: int, link: int, first_end: int) -> int:
        self.next.append(following)
        self.lengths.append(length)
        self.links.append(link)
        self.first_end.append(first_end)
        return len(self.next) - 1


class LookupIndex:
    """A document's automaton with, for each state, the token that followed most often. Never changes."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.automaton = automaton = SuffixAutomaton(token_ids)
        links, lengths, following = automaton.links, automaton.lengths, automaton.next
        # A state made by an append, not by a split, is a prefix of the text and ends once on its own account.
        counts = [int(end + 1 == length) for end, length in zip(automaton.first_end, lengths, strict=True)]
        latest_end = list(automaton.first_end)
        for state in sorted(range(1, len(links)), key=lengths.__getitem__, reverse=True):
            link = links[state]
            counts[link] += counts[state]
            latest_end[link] = max(latest_end[link], latest_end[state])
        self._likely = [
            next(iter(options))
            if len(options) == 1
            else max(options, key=lambda t: (counts[options[t]], latest_end[options[t]]), default=None)
            for options in following
        ]

    def match(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of that match which something follows."""
        while state and self._likely[state] is None:
            state = self.automaton.links[state]
            length = self.automaton.lengths[state]
        return state, length

    def continuation(self, state: int, num_tokens: int) -> Iterator[tuple[int, bool]]:
        """Up to `num_tokens` tokens, each the most frequent after the match and those before it (the one seen last
        where two are equally frequent), and whether nothing else ever follows them."""
        for _ in range(num_tokens):
            if (token_id := self._likely[state]) is None:
                return
            following = self.automaton.next[state]
            yield token_id, len(following) == 1
            state = following[token_id]


class LookupDrafter:
    """Proposes the continuation of the longest suffix of the output found in the document, or of the longest found
    in the context or the output before: the one that is right more often after matches of these lengths.

    index          the document, shared by all its questions.
    eos_token_ids  a draft ends with any of them.
    context        tokens between document and output (the question, earlier turns).
    min_match      shortest match that is followed.
    """

    def __init__(
        self,
        index: LookupIndex,
        eos_token_ids: Collection[int],
        *,
        context: Sequence[int] = (),
        min_match: int = MIN_MATCH,
    ) -> None:
        if min_match < 1:
            raise InvalidParameter(f"min_match must be at least 1, got {min_match}")
        self._index = index
        self._eos_token_ids = frozenset(eos_token_ids)
        self._min_match = min_match
        self._recent = [*context, SEPARATOR]
        self._recent_automaton = SuffixAutomaton(self._recent)
        self._state, self._length = 0, 0  # the longest match in the document

    def start(self, progress: ProgressFn | None = None) -> None:
        """Nothing to read: the index is the draft prompt."""

    def propose(self, num_tokens: int, warp: Warp, generator: torch.Generator, *, need_probs: bool) -> Proposal:
        """At most `num_tokens` tokens, none without a match; `probs` is None, q being one-hot."""
        return Proposal(self.lookup(num_tokens))

    def commit(self, token_ids: Sequence[int]) -> None:
        """Follow the emitted tokens. Drafts were never added, so there is nothing to forget."""
        for token_id in token_ids:
            self._state, self._length = self._index.automaton.step(self._state, self._length, token_id)
            self._recent.append(token_id)
            self._recent_automaton.append(token_id)

    def lookup(self, num_tokens: int) -> list[int]:
        """What `propose` proposes."""
        return [token_id for token_id, _ in self._draft(num_tokens)]

    def outlook(self, num_tokens: int) -> list[Prior]:
        """The classes of the tokens that `propose` would propose."""
        return [prior for _, prior in self._draft(num_tokens)]

    def _draft(self, num_tokens: int) -> list[tuple[int, Prior]]:
        draft: list[tuple[int, Prior]] = []
        for found in (self._from_recent(num_tokens), self._from_document(num_tokens)):
            if found and (not draft or found[0][1].kept > draft[0][1].kept):
                draft = found
        for i, (token_id, _) in enumerate(draft):
            if token_id in self._eos_token_ids:
                return draft[: i + 1]
        return draft

    def _from_document(self, num_tokens: int) -> list[tuple[int, Prior]]:
        state, length = self._index.match(self._state, self._length)
        if length < self._min_match:
            return []
        continuation = enumerate(self._index.continuation(state, num_tokens))
        return [(token_id, _prior("sole" if sole else "likely", length + i)) for i, (token_id, sole) in continuation]

    def _from_recent(self, num_tokens: int) -> list[tuple[int, Prior]]:
        end, length = self._recent_match()
        if length < self._min_match:
            return []
        # The copy may run into itself: a period repeats.
        period = len(self._recent) - 1 - end
        token_ids = [self._recent[end + 1 + i % period] for i in range(num_tokens)]
        if SEPARATOR in token_ids:
            del token_ids[token_ids.index(SEPARATOR) :]
        return [(token_id, _prior("recent", length + i)) for i, token_id in enumerate(token_ids)]

    def _recent_match(self) -> tuple[int, int]:
        """(index of its last token, length) of the first occurrence of the longest suffix seen before."""
        automaton = self._recent_automaton
        state = max(0, automaton.links[automaton.last])
        return automaton.first_end[state], automaton.lengths[state]


@cache
def _prior(place: str, length: int) -> Prior:
    """Of a token after a match of `length` tokens, those drafted before it included."""
    shares = KEPT_AFTER_MATCH[place]
    length = min(length, len(shares))
    share = shares[length - 1]
    return Prior((place, length), PRIOR_WEIGHT * share, PRIOR_WEIGHT * (1 - share))
