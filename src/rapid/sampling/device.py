"""Verification on the device: the laws of `verify.py` without waiting for it once per token.

`AcceptanceRule.verify` asks the host after every comparison; here the verdict is three tensors, read in one go, and
the whole computation can be captured in a CUDA graph. Randomness comes in as uniforms. The greedy verdicts are those
of `AcceptanceRule.verify`; sampled ones follow the same distribution, drawn by inverting the distribution function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rapid.sampling.transfer import adjusted_scores
from rapid.sampling.verify import AcceptanceRule


@dataclass(frozen=True)
class BlockVerdict:
    """A verdict still on the device: int64 scalars, and whether every row of scores was usable (bool scalar)."""

    num_accepted: torch.Tensor
    next_token: torch.Tensor
    valid: torch.Tensor


def verify_block(
    rule: AcceptanceRule,
    target_scores: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
) -> BlockVerdict:
    """Judge n draft tokens [n] by target scores [n + 1, V]; see `AcceptanceRule.verify`.

    draft_probs  q [n, V]; None where the drafts were certain, or where the rule needs no q.
    uniforms     float64 [n + 1], one per draft token and one for the token that follows; None decodes greedily.
    """
    num_drafted = len(draft_tokens)
    if target_scores.shape[0] != num_drafted + 1:
        raise ValueError(f"{num_drafted} draft tokens need {num_drafted + 1} rows of scores")
    if uniforms is None:
        num_accepted, next_token = _greedy(rule, target_scores, draft_tokens, draft_probs)
    else:
        num_accepted, next_token = _sampled(rule, target_scores, draft_tokens, draft_probs, uniforms)
    return BlockVerdict(num_accepted, next_token, torch.isfinite(target_scores.amax(-1)).all())


def draw_token(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index, an int64 scalar, at which the sum of non-negative weights [V] passes `uniform` (float64, below 1)
    of its total. An index of weight 0 is never drawn."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[-1:]
    index = torch.searchsorted(cumulative, uniform.reshape(1) * total, right=True)
    # The product may round up to the total, which lies behind the last index of positive weight.
    return torch.minimum(index, (cumulative < total).sum())[0]


def _greedy(
    rule: AcceptanceRule, scores: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    choices = scores.argmax(-1)
    accept = choices
    if rule.transfers and len(draft_tokens):
        drafted = scores[:-1]
        q = _dense(draft_tokens, draft_probs, drafted)
        adjusted = adjusted_scores(drafted, drafted.softmax(-1), q, rule.eta, rule.alpha)
        accept = torch.cat((adjusted.argmax(-1), choices[-1:]))
    num_accepted = _leading(draft_tokens == accept[:-1])
    followers = accept if rule.law == "transfer" else choices
    return num_accepted, _row(followers, num_accepted)


def _sampled(
    rule: AcceptanceRule,
    scores: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    probs = scores.softmax(-1)
    if not len(draft_tokens):
        return uniforms.new_zeros((), dtype=torch.int64), draw_token(probs[0], uniforms[-1])
    p = probs[:-1]
    q = _dense(draft_tokens, draft_probs, p)
    accept = p
    if rule.transfers:
        accept = adjusted_scores(scores[:-1], p, q, rule.eta, rule.alpha).softmax(-1)
    at = draft_tokens[:, None]
    ratio = accept.gather(-1, at).double() / q.gather(-1, at).double()
    num_accepted = _leading(uniforms[:-1] < ratio[:, 0])
    rejected = num_accepted.clamp_max(len(draft_tokens) - 1)
    residual = _residual(rule, *(_row(rows, rejected) for rows in (p, q, accept)))
    weights = torch.where(num_accepted == len(draft_tokens), probs[-1], residual)
    return num_accepted, draw_token(weights, uniforms[-1])


def _residual(
    rule: AcceptanceRule, target_probs: torch.Tensor, draft_probs: torch.Tensor, accept_probs: torch.Tensor
) -> torch.Tensor:
    """`AcceptanceRule.residual` [V] without asking the host whether it sums to zero."""
    if rule.law == "paper":
        weights, fallback = target_probs - torch.minimum(accept_probs, draft_probs), target_probs
    else:
        weights, fallback = accept_probs - draft_probs, accept_probs
    weights = weights.clamp_min(0)
    return torch.where(weights.sum() > 0, weights, fallback)


def _leading(kept: torch.Tensor) -> torch.Tensor:
    """How many of kept [n] are True before the first False."""
    return kept.long().cumprod(0).sum()


def _row(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row `index` (a scalar on the device) of rows [n, ...]."""
    return rows.index_select(0, index.reshape(1))[0]


def _dense(draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if draft_probs is not None:
        return draft_probs
    return torch.zeros_like(like).scatter_(-1, draft_tokens[:, None], 1.0)
