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

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rapid.errors import InvalidParameter
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.models.base import ProgressFn
    from rapid.sampling.warp import Warp

# Shortest match worth a draft of fixed length: on SmolLM2's answers (fairy tales, Wikipedia, 2.9-4.1K tokens) a
# match of one token led to 0.4 accepted tokens, of two to 0.8, of three to 1.3, in the output itself to 1.0-6.
MIN_MATCH = 2
# Longest match told apart from longer ones in `LookupDrafter.bucket`, in bits.
MAX_MATCH_BITS = 4
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

    def continuation(self, state: int, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens, each the most frequent after the match and those before it; the one seen
        last where two are equally frequent."""
        token_ids: list[int] = []
        while len(token_ids) < num_tokens and (token_id := self._likely[state]) is not None:
            token_ids.append(token_id)
            state = self.automaton.next[state][token_id]
        return token_ids


class LookupDrafter:
    """Proposes the continuation of the longest suffix of the output found in the document, the context or the
    output before; of two equally long the one outside the document, which is right more often.

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
        state, length = self._index.match(self._state, self._length)
        end, recent_length = self._recent_match()
        if max(length, recent_length) < self._min_match:
            return []
        if length > recent_length:
            token_ids = self._index.continuation(state, num_tokens)
        else:
            # The copy may run into itself: a period repeats.
            period = len(self._recent) - 1 - end
            token_ids = [self._recent[end + 1 + i % period] for i in range(num_tokens)]
            if SEPARATOR in token_ids:
                del token_ids[token_ids.index(SEPARATOR) :]
        for i, token_id in enumerate(token_ids):
            if token_id in self._eos_token_ids:
                return token_ids[: i + 1]
        return token_ids

    @property
    def match_length(self) -> int:
        """Tokens of the match the next proposal rests on; 0 where none is long enough."""
        length = max(self._index.match(self._state, self._length)[1], self._recent_match()[1])
        return length if length >= self._min_match else 0

    @property
    def bucket(self) -> int:
        """A class of matches that are about equally trustworthy: by the bits of the length, and by whether the
        match is in the document. 0 where there is none."""
        length = self._index.match(self._state, self._length)[1]
        recent_length = self._recent_match()[1]
        longest = max(length, recent_length)
        if longest < self._min_match:
            return 0
        return 2 * min(longest.bit_length(), MAX_MATCH_BITS) + (recent_length >= length)

    def _recent_match(self) -> tuple[int, int]:
        """(index of its last token, length) of the first occurrence of the longest suffix seen before."""
        automaton = self._recent_automaton
        state = max(0, automaton.links[automaton.last])
        return automaton.first_end[state], automaton.lengths[state]
