"""Drafting with the target's own weights over the ends of its own prompt: MagicDec's self-speculation.

The sequence does the work; here it is only told, before each draft, what has been emitted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rapid.drafting.model import ModelDrafter
from rapid.types import Proposal

if TYPE_CHECKING:
    import threading

    import torch

    from rapid.models.streaming import StreamingSequence
    from rapid.sampling.warp import Warp


class StreamingDrafter(ModelDrafter):
    """A `ModelDrafter` whose sequence takes over, before each draft, the verified cache of the emitted tokens.

    So a draft depends on the emitted text and on where the window starts, not on what was drafted and rejected.
    """

    def __init__(self, sequence: StreamingSequence, prompt: Sequence[int], eos_token_ids: Collection[int]) -> None:
        super().__init__(sequence, prompt, eos_token_ids)
        self._streaming = sequence

    def propose(
        self,
        num_tokens: int,
        warp: Warp,
        generator: torch.Generator,
        *,
        need_probs: bool,
        cancelled: threading.Event | None = None,
    ) -> Proposal:
        if len(self._history) > self._streaming.window:
            return Proposal([])
        self._streaming.follow(self._history[:-1])
        return super().propose(num_tokens, warp, generator, need_probs=need_probs, cancelled=cancelled)
