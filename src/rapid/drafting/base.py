"""The contract of a drafter: start, propose, commit."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rapid.models.base import ProgressFn
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.sampling.warp import Warp

# Longest draft whose length is chosen by what it is expected to bring.
LONGEST_DRAFT = 16


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


@dataclass(frozen=True)
class Prior:
    """A class of draft tokens that are about equally trustworthy, and what is believed of it before any was seen:
    as if, where those before it were kept, `kept` tokens of the class had been kept and `lost` rejected."""

    kind: Hashable
    kept: float
    lost: float


def _model_prior(position: int) -> Prior:
    return Prior(sum(position >= first for first in (2, 4)), 1.2, 0.8)


# Of a model's draft, the classes are positions: 1 | 2, 3 | 4 and later.
MODEL_OUTLOOK = tuple(_model_prior(position) for position in range(1, LONGEST_DRAFT + 1))


def outlooks(drafters: Mapping[str, Drafter]) -> dict[str, Sequence[Prior]]:
    """The drafters that may have something to propose now, each with the classes of the tokens it would propose,
    at most `LONGEST_DRAFT`. A drafter without an `outlook` of its own is a model."""
    found: dict[str, Sequence[Prior]] = {}
    for name, drafter in drafters.items():
        outlook = getattr(drafter, "outlook", None)
        if priors := MODEL_OUTLOOK if outlook is None else outlook(LONGEST_DRAFT):
            found[name] = priors
    return found
