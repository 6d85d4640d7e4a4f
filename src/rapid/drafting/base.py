"""The contract of a drafter: start, propose, commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rapid.models.base import ProgressFn
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.sampling.warp import Warp


class Drafter(Protocol):
    """Proposes tokens that continue what has been emitted so far."""

    def start(self, progress: ProgressFn | None = None) -> None:
        """Read the draft prompt. Called once, before the first `propose`."""
        ...

    def propose(self, num_tokens: int, warp: Warp, generator: torch.Generator, *, need_probs: bool) -> Proposal:
        """Draft up to `num_tokens` tokens (fewer, or none, where there is nothing sensible to draft).

        With `need_probs` the proposal carries q [n, vocabulary] unless its tokens were certain. A drafter
        stops after an end token.
        """
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """The tokens this round emitted: forget what was drafted beyond them."""
        ...


def buckets(drafters: Mapping[str, Drafter]) -> dict[str, int]:
    """The drafters that may have something to propose now, each with a class of how far its proposal can be
    trusted: a lookup's `bucket` (0: no match), 0 for a model."""
    found = {name: getattr(drafter, "bucket", None) for name, drafter in drafters.items()}
    return {name: bucket or 0 for name, bucket in found.items() if bucket != 0}
