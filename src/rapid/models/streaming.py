"""A reading of a long text through a few of its tokens: the first ones (attention sinks) and the most recent.

StreamingLLM (Xiao et al., ICLR 2024) found that a model which sees the first four tokens and a recent window stays
fluent; MagicDec (Chen et al., ICLR 2025) drafts that way with the target's own weights. Here nothing is read twice:
keys and values of what the target has read are copied out of the target's cache, so they know the whole text, and
only drafted tokens are computed.

Every key keeps the position it has in the text. StreamingLLM, and MagicDec's code after it, count positions inside
the cache instead, in order to run beyond the length a model was trained for. An answer here never leaves the target's
window, so nothing would be gained, the copied keys would have to be rotated anew, and distances would be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rapid.errors import InvalidParameter, ModelError, PromptTooLong
from rapid.models.base import ProgressFn
from rapid.models.cache import GrowingCache
from rapid.models.hf import HFSequence

# The recent window slides this many tokens at a time: moving it copies all of it.
SLIDE = 128


class StreamingSequence:
    """A sequence over the weights of `source`, whose cache it borrows from.

    A token reads the first `sinks` tokens of the text and those from `recent_start` to itself. Right after `follow`
    that is at least `recent` tokens beside the sinks (all, where the text is shorter), and at most `recent + SLIDE`.
    """

    def __init__(self, source: HFSequence, *, sinks: int, recent: int) -> None:
        if sinks < 0 or recent < 1:
            raise InvalidParameter(f"a streaming cache needs sinks >= 0 and recent >= 1, got {sinks} and {recent}")
        if not source.model.takes_positions:
            raise ModelError(
                f"{source.model.name} counts positions by itself, so part of its cache cannot be read; method magicdec "
                "needs a model with position_ids"
            )
        self.source = source
        self.token_ids: list[int] = []
        self.cache = GrowingCache(source.model.num_layers, source.model.cache_dtype)
        self.recent_start = sinks
        self.sinks = sinks
        self.recent = recent
        self._copied = 0  # tokens whose keys and values are the source's own

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def window(self) -> int:
        return self.source.window

    def follow(self, token_ids: Sequence[int]) -> None:
        """Hold exactly `token_ids`: what `source` has read of them is copied (again, where it was drafted here),
        the rest is computed. Raises `PromptTooLong` beyond the window."""
        start = _shared(self.token_ids[: self._copied], token_ids)
        known = _shared(self.source.token_ids, token_ids)
        self.rewind(start)
        if known > start:
            self._copy(start, known)
            self.token_ids, self._copied = list(token_ids[:known]), known
        if self.length < len(token_ids):
            self._run(token_ids[self.length :], logits_to_keep=1)

    def prefill(self, token_ids: Sequence[int], progress: ProgressFn | None = None) -> None:
        self.follow([*self.token_ids, *token_ids])
        if progress:
            progress(len(token_ids), len(token_ids))

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._run(token_ids, logits_to_keep=0)

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        del self.token_ids[length:]
        self._copied = min(self._copied, length)
        self.cache.rewind(self._place(length))

    @torch.inference_mode()
    def _copy(self, start: int, end: int) -> None:
        """The source's keys and values of tokens [start, end); of all that are visible where the window slides, or
        where a rewind left it short."""
        recent_start = max(self.sinks, end - self.recent)
        if start == 0 or not 0 <= recent_start - self.recent_start <= SLIDE:
            self.recent_start, start = recent_start, 0
        self.cache.rewind(self._place(start))
        # Room until the window slides, so that nothing is allocated in the middle of an answer.
        self.cache.reserve(min(self._place(end) + SLIDE, self.window))
        spans = [(start, max(start, min(self.sinks, end))), (max(start, self.recent_start), end)]
        for layer, (keys, values) in zip(self.cache.growing, self.source.cache.read(end), strict=True):
            for first, last in spans:
                layer.update(keys[..., first:last, :], values[..., first:last, :])

    def _run(self, token_ids: Sequence[int], logits_to_keep: int) -> torch.Tensor:
        total = self.length + len(token_ids)
        if total > self.window:
            raise PromptTooLong(
                f"{total} tokens do not fit the window of {self.window} of {self.source.model.name}; "
                "use a shorter document or question, or fewer new tokens"
            )
        # A forward pass that raised half way may have filled some layers.
        self.cache.rewind(self._place(self.length))
        logits = self.source.model.run(token_ids, self.cache, logits_to_keep, first_position=self.length)
        self.token_ids.extend(token_ids)
        return logits

    def _place(self, position: int) -> int:
        """Where in the cache the token at `position` of the text stands, or would stand."""
        if position <= self.sinks:
            return position
        return max(self.sinks, position - (self.recent_start - self.sinks))


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    length = min(len(first), len(second))
    if list(first[:length]) == list(second[:length]):
        return length
    return next(i for i in range(length) if first[i] != second[i])
