"""Small language models whose every answer is known: for tests and for the documentation, never for users.

`Script` continues one text, `Markov` draws from a table, `Const` from one distribution; `tiny` is a random Llama
behind the same class as real weights. They hold the contracts of `rapid.models.base`, window included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from rapid.errors import PromptTooLong
from rapid.models.base import ProgressFn

if TYPE_CHECKING:
    from rapid.models.hf import HFModel

# Longer than any toy prompt.
_WIDE = 2**20


class _NextTokens(Protocol):
    """What a `ToySequence` asks of its model."""

    window: int

    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits [len(token_ids) - start, V] for what follows each position from `start` on."""
        ...


class ToySequence:
    """A reading by a toy model: its cache is the text itself. `peak` is the largest length it ever had."""

    def __init__(self, model: _NextTokens) -> None:
        self.model = model
        self.token_ids: list[int] = []
        self.peak = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def window(self) -> int:
        return self.model.window

    def prefill(self, token_ids: Sequence[int], progress: ProgressFn | None = None) -> None:
        self._read(token_ids)
        if progress:
            progress(len(token_ids), len(token_ids))

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        start = self.length
        self._read(token_ids)
        return self.model.logits(self.token_ids, start)

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        del self.token_ids[length:]

    def _read(self, token_ids: Sequence[int]) -> None:
        if self.length + len(token_ids) > self.window:
            raise PromptTooLong(f"{self.length + len(token_ids)} tokens do not fit the window of {self.window}")
        self.token_ids.extend(token_ids)
        self.peak = max(self.peak, self.length)


class Markov:
    """A table of next-token probabilities [V, V]: row t is the distribution after token t. Zeros are allowed."""

    num_parameters = 0

    def __init__(
        self, table: torch.Tensor, *, window: int = _WIDE, eos_token_ids: Iterable[int] = (), name: str = "markov"
    ) -> None:
        self.name = name
        self.table = table.log()
        self.vocab_size = table.shape[-1]
        self.window = window
        self.eos_token_ids = frozenset(eos_token_ids)

    def new_sequence(self) -> ToySequence:
        """An empty sequence."""
        return ToySequence(self)

    def step_bytes(self, length: int) -> int:
        """The same at any length."""
        return 1

    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits [n, V]: the logarithm of the table's rows."""
        return self.table[torch.tensor(token_ids[start:])]


class Const(Markov):
    """The same next-token probabilities [V] everywhere."""

    def __init__(
        self, probs: Sequence[float], *, window: int = _WIDE, eos_token_ids: Iterable[int] = (), name: str = "const"
    ) -> None:
        row = torch.tensor(probs)
        super().__init__(row.expand(len(row), -1), window=window, eos_token_ids=eos_token_ids, name=name)


class Script:
    """Continues `script`, then says its end token, the first of `eos_token_ids`.

    Where it stands in the script is read off the text: the longest end of the text that begins the script. A text
    that does not end in the script's beginning is followed by the script's first token.
    """

    num_parameters = 0

    def __init__(
        self,
        script: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        window: int = _WIDE,
        name: str = "script",
    ) -> None:
        self.name = name
        self.script = list(script)
        self.vocab_size = vocab_size
        self.window = window
        self.eos_token_ids = frozenset(eos_token_ids)
        self._continuation = [*self.script, eos_token_ids[0]]

    def new_sequence(self) -> ToySequence:
        """An empty sequence."""
        return ToySequence(self)

    def step_bytes(self, length: int) -> int:
        """The same at any length."""
        return 1

    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits [n, V]: 0 for the one next token, -inf for all others."""
        logits = torch.full((len(token_ids) - start, self.vocab_size), -torch.inf)
        for row in range(len(logits)):
            logits[row, self._continuation[self._position(token_ids[: start + row + 1])]] = 0
        return logits

    def _position(self, token_ids: Sequence[int]) -> int:
        longest = min(len(self.script), len(token_ids))
        matches = (k for k in range(longest, 0, -1) if list(token_ids[-k:]) == self.script[:k])
        return next(matches, 0)


def tiny(
    seed: int,
    *,
    vocab_size: int = 64,
    head_rows: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    window: int = 2048,
    eos_token_ids: Iterable[int] = (),
    short_blocks: bool = True,
) -> HFModel:
    """A random Llama of two layers in float32 with grouped attention, the same for the same arguments.

    `head_rows` (default: `vocab_size`) pads its embedding and output head beyond the tokenizer's ids. Without
    `short_blocks` all of its forward passes are transformers' own.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from rapid.models.hf import HFModel

    config = LlamaConfig(
        vocab_size=head_rows or vocab_size,
        hidden_size=8 * heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=window,
        # Wide weights: the usual 0.02 leaves all next tokens nearly equally probable, and argmax a matter of rounding.
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        llama = LlamaForCausalLM(config).eval()
    model = HFModel(llama, name=f"tiny-{seed}", vocab_size=vocab_size, eos_token_ids=frozenset(eos_token_ids))
    model.use_grouped_attention()
    if short_blocks:
        model.use_short_blocks()
    return model
