"""When an answer ends, counted token by token inside a block of several.

`StopRule` knows token ids only: end tokens, the limit, and any further criterion given as a function of the
emitted ids (a stop string watched by the text layer, a caller's own rule).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rapid.types import FinishReason

# Called with all ids emitted so far, the newest last; True ends the answer after that token.
StopFn = Callable[[Sequence[int]], bool]


class StopRule:
    """Cuts blocks of emitted tokens at the first end token, at `max_new_tokens`, or where `should_stop` says so.

    The end token itself is emitted (it counts, as in transformers); the text layer leaves it out of the text.
    """

    def __init__(
        self, max_new_tokens: int, eos_token_ids: Collection[int] = (), should_stop: StopFn | None = None
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.should_stop = should_stop
        self.emitted: list[int] = []

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.emitted)

    def cut(self, token_ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """The part of `token_ids` that is emitted, and why the answer ends there, if it does."""
        for count, token in enumerate(token_ids, 1):
            self.emitted.append(token)
            if token in self.eos_token_ids or (self.should_stop and self.should_stop(self.emitted)):
                return list(token_ids[:count]), "stop"
            if self.remaining <= 0:
                return list(token_ids[:count]), "length"
        return list(token_ids), None
