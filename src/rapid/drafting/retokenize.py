"""Drafting with a model that has another tokenizer: its text is written anew in the target's tokens.

The law. Let y be the tokens emitted so far. The drafter reads the text of y, continues it greedily, and its text is
tokenized for the target: the draft x_1 .. x_k and its length are a function of y. Given y every drafted token is
therefore certain, q_i is one-hot at x_i, and the law `exact` (rapid.sampling.verify) keeps x_1 with probability
p(x_1 | y) and otherwise draws from p(. | y) without x_1: what comes out is p(. | y). Given that x_1 was kept, x_2 is
still certain, and the same holds for p(. | y x_1), and so on; the token after the draft is drawn from p. By the chain
rule the answer has the target's own distribution, whatever the two vocabularies, segmentations and models are, and
at temperature 0 it is the target's greedy answer. Nothing in this needs the text to be written well: a badly
segmented draft is rejected, not wrong. (Randomness of the drafter's own, independent of the verdicts, would change
nothing: condition on it. It is left out, because a token that is certain is kept with probability p(x), and the most
probable one is kept most often.)

A transfer (eta > 0) is refused with such a drafter. It shifts p towards q token by token, and the drafter's q lives on
its own tokens: what mass it gives to a target token that is a part of one of its tokens, or several of them, is not
defined by one forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rapid.drafting.model import shared_prefix
from rapid.models.base import ProgressFn, TokenSequence
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.sampling.warp import Warp
    from rapid.vocabulary import Vocabulary

# Drafter tokens made at most for one proposed token: its tokens may be shorter than the target's.
_MAX_STEPS_PER_TOKEN = 4


class RetokenizingDrafter:
    """Drafts with `sequence`, which reads `prompt` in `draft_vocabulary`, for a target with `target_vocabulary`.

    An end token or any other special token ends a draft and is not part of it. The emitted text is tokenized for the
    drafter as a whole before each draft, so it never drifts from what was emitted; what the drafter has read of it
    already is reused. Beyond its window nothing is drafted.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        prompt: Sequence[int],
        eos_token_ids: Collection[int],
        *,
        draft_vocabulary: Vocabulary,
        target_vocabulary: Vocabulary,
    ) -> None:
        self._sequence = sequence
        self._prompt = list(prompt)
        self._ends = frozenset(eos_token_ids) | draft_vocabulary.special_ids
        self._draft_vocabulary = draft_vocabulary
        self._target_vocabulary = target_vocabulary
        self._emitted: list[int] = []

    def start(self, progress: ProgressFn | None = None) -> None:
        """Read the prompt, all but its last token, which the first `propose` feeds."""
        keep = shared_prefix(self._sequence.token_ids, self._prompt[:-1])
        self._sequence.rewind(keep)
        if len(self._prompt) <= self._sequence.window:
            self._sequence.prefill(self._prompt[keep:-1], progress)

    def propose(self, num_tokens: int, warp: Warp, generator: torch.Generator, *, need_probs: bool) -> Proposal:
        """At most `num_tokens` target tokens; `probs` is None, q being one-hot. Neither `warp`, which is about the
        target's tokens, nor `generator` has a part in it."""
        text_ids = self._draft_vocabulary.encode(self._target_vocabulary.whole_characters(self._emitted))
        if any(token_id >= self._draft_vocabulary.size for token_id in text_ids):
            return Proposal([])
        history = [*self._prompt, *text_ids]
        # The last token is always fed anew: its logits are what the draft starts from.
        keep = min(shared_prefix(self._sequence.token_ids, history), len(history) - 1)
        self._sequence.rewind(keep)
        feed = history[keep:]
        known = self._draft_vocabulary.decode(text_ids)
        drafted: list[int] = []
        proposed: list[int] = []
        wanted = num_tokens
        while wanted > 0 and len(drafted) < _MAX_STEPS_PER_TOKEN * num_tokens:
            more = self._draft(feed, wanted)
            drafted += more
            text = self._draft_vocabulary.whole_characters([*text_ids, *drafted])
            if not text.startswith(known):
                break
            proposed = self._target_vocabulary.continuation(self._emitted, text[len(known) :])
            if len(more) < wanted:
                break
            feed, wanted = more[-1:], num_tokens - len(proposed)
        return Proposal(proposed[:num_tokens])

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take note of what was emitted; the drafter's own sequence follows at the next draft."""
        self._emitted.extend(token_ids)

    def _draft(self, feed: Sequence[int], num_tokens: int) -> list[int]:
        """Up to `num_tokens` of the drafter's most probable tokens after `feed`, short of an end token."""
        drafted: list[int] = []
        while len(drafted) < num_tokens and self._sequence.length + len(feed) <= self._sequence.window:
            token_id = int(self._sequence.forward(feed)[-1].argmax())
            if token_id in self._ends:
                break
            drafted.append(token_id)
            feed = [token_id]
        return drafted
