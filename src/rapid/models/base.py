"""What the rest of the system may ask of a language model.

`LanguageModel` is weights; `TokenSequence` is one reading of a text by those weights, with its own cache.
Self-speculation is two sequences of one model: one copy of the weights, two caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

# called with (tokens read so far, tokens in all) while a long text is read
ProgressFn = Callable[[int, int], None]


class TokenSequence(Protocol):
    """Tokens that a model has read, with the cache of their keys and values."""

    @property
    def token_ids(self) -> Sequence[int]:
        """What has been read, position by position."""
        ...

    @property
    def length(self) -> int:
        """Tokens in the cache: the next one fed stands at this position."""
        ...

    @property
    def window(self) -> int:
        """The largest `length` this sequence can reach."""
        ...

    def prefill(self, token_ids: Sequence[int], progress: ProgressFn | None = None) -> None:
        """Read `token_ids` in chunks, without logits. Raises `PromptTooLong` beyond the window."""
        ...

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Read `token_ids` (n of them) and return logits [n, vocab_size] in float32, row i for what follows
        token i. Raises `PromptTooLong` beyond the window."""
        ...

    def rewind(self, length: int) -> None:
        """Forget everything from position `length` on, in O(1)."""
        ...


class LanguageModel(Protocol):
    """Weights that can start any number of sequences."""

    name: str
    vocab_size: int  # ids the tokenizer knows; wider output heads are cut to it
    window: int  # longest sequence
    eos_token_ids: frozenset[int]
    num_parameters: int

    def new_sequence(self) -> TokenSequence:
        """An empty sequence over these weights."""
        ...

    def step_bytes(self, length: int) -> int:
        """Bytes that one decode step after `length` tokens has to read: weights and cache."""
        ...
