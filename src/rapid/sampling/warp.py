"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p.

Filters work on scores (log-probabilities up to a constant): a filtered token has score -inf, so that a later
shift of the scores cannot bring it back. Temperature 0 is greedy: the scores are then the logits themselves,
because the greedy laws compare logits and take p and q at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rapid.errors import InvalidLogits

# Below this a float32 temperature is zero, and 0 / 0 is NaN; long before, the distribution is one-hot.
_LEAST_TEMPERATURE = 1e-30


class Warp(Protocol):
    """Turns logits into scores. `TokenWarp` is ours; the transformers adapter wraps its logits processors."""

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen by argmax instead of drawn."""
        ...

    def scores(self, logits: torch.Tensor, emitted: Sequence[int]) -> torch.Tensor:
        """Scores [n, V] of logits [n, V]. `emitted` holds the ids after the prompt, up to where the last row
        stands: row i follows `emitted[: len(emitted) - (n - 1) + i]`."""
        ...


@dataclass(frozen=True)
class TokenWarp:
    """The usual filters, in the usual order: temperature, top-k, top-p, min-p.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. The most probable token always survives.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def scores(self, logits: torch.Tensor, emitted: Sequence[int] = ()) -> torch.Tensor:
        check_logits(logits)
        if self.greedy:
            return logits
        # Divided after taking off the maximum: a tiny temperature must not overflow to inf.
        scores = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, _LEAST_TEMPERATURE)
        if 0 < self.top_k < scores.shape[-1]:
            kth_best = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth_best, -torch.inf)
        if self.top_p < 1:
            scores = _keep_top_p(scores, self.top_p)
        if self.min_p > 0:
            probs = scores.softmax(-1)
            scores = scores.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)
        return scores


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of most probable tokens whose probabilities sum to at least `top_p`."""
    ordered, order = scores.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    drop = mass_before >= top_p
    drop[..., 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def check_logits(logits: torch.Tensor) -> None:
    """Raise `InvalidLogits` where a row of logits [n, V] holds NaN or +inf, or nothing above -inf.

    One reduction finds all three: the maximum of a row with NaN is NaN.
    """
    if not bool(torch.isfinite(logits.amax(-1)).all()):
        raise InvalidLogits(
            "the model returned NaN, infinite or no finite logits: its weights or its dtype do not fit this "
            "input; try --dtype float32"
        )
