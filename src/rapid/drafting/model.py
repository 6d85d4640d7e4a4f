"""Drafting with a language model that reads its own prompt.

With a retrieved prompt this is RAPID's RAG drafter; with the target's own prompt, plain speculative decoding. It
does not know which: a prompt is token ids.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rapid.models.base import ProgressFn, TokenSequence
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.sampling.warp import Warp


class ModelDrafter:
    """Drafts by running a model over `prompt` + the emitted tokens.

    `sequence` may hold an earlier reading: what it shares with `prompt` is reused. Beyond the model's window it
    drafts nothing, and the target goes on alone.

    min_draft_prob  a draft ends after a token with a smaller q. After it, not before: that keeps the law `exact` exact
                    (rapid.drafting.cascade has the proof), and no other.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        prompt: Sequence[int],
        eos_token_ids: Collection[int],
        *,
        min_draft_prob: float = 0.0,
    ) -> None:
        self._min_draft_prob = min_draft_prob
        self._sequence = sequence
        self._prompt_length = len(prompt)
        self._history = list(prompt)
        self._eos_token_ids = frozenset(eos_token_ids)

    def start(self, progress: ProgressFn | None = None) -> None:
        """Read the prompt, all but its last token, which the first `propose` feeds."""
        keep = shared_prefix(self._sequence.token_ids, self._history[:-1])
        self._sequence.rewind(keep)
        if len(self._history) <= self._sequence.window:
            self._sequence.prefill(self._history[keep:-1], progress)

    def propose(
        self,
        num_tokens: int,
        warp: Warp,
        generator: torch.Generator,
        *,
        need_probs: bool,
        cancelled: threading.Event | None = None,
    ) -> Proposal:
        """As `Drafter.propose`; `cancelled` lets another thread end it after its present token."""
        import torch

        from rapid.sampling.verify import draw

        emitted = self._history[self._prompt_length :]
        feed = self._history[self._sequence.length :]
        drafted: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(num_tokens):
            if self._sequence.length + len(feed) > self._sequence.window:
                break
            logits = self._sequence.forward(feed)[-1:]
            scores = warp.scores(logits, emitted + drafted)
            if need_probs:
                rows.append(scores.softmax(-1))
            drafted.append(int(scores.argmax()) if warp.greedy else draw(rows[-1][0], generator))
            if self.ends(drafted) or self._is_unsure(scores[0], drafted[-1]) or (cancelled and cancelled.is_set()):
                break
            feed = drafted[-1:]
        return Proposal(drafted, torch.cat(rows) if rows else None)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether a draft is over after `token_ids`."""
        return token_ids[-1] in self._eos_token_ids

    def _is_unsure(self, scores: torch.Tensor, token_id: int) -> bool:
        return self._min_draft_prob > 0 and float(scores.softmax(-1)[token_id]) < self._min_draft_prob

    def commit(self, token_ids: Sequence[int]) -> None:
        known = self._sequence.token_ids
        position = len(self._history)
        self._history.extend(token_ids)
        # Of what was drafted and fed beyond the history, only the part that was emitted stays.
        while position < min(len(known), len(self._history)) and known[position] == self._history[position]:
            position += 1
        # The last token is always fed anew: its logits are what the next draft starts from.
        self._sequence.rewind(min(position, len(known), len(self._history) - 1))

    def retract(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` committed; a `commit` of what was emitted instead has to follow."""
        del self._history[len(self._history) - num_tokens :]


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    length = min(len(first), len(second))
    if list(first[:length]) == list(second[:length]):
        return length
    return next(i for i in range(length) if first[i] != second[i])
