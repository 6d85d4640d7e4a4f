"""Verification: which drafted tokens are kept, and the token that follows them.

    law        accept x with min(1, a(x)/q(x))   residual ~ norm(...)      output at a drafted position
    exact      a = p                             (p - q)+                  p                (lossless)
    transfer   a = p_hat                         (p_hat - q)+              p_hat
    paper      a = p_hat                         max(p - p_hat, p - q, 0)  min(q, p_hat) + rest of the residual

p is the target's distribution, q the drafter's, p_hat the adjusted target (see transfer.py). With eta 0,
p_hat is p and the three laws are one. The bonus token after a wholly accepted draft is drawn from p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rapid.params import Law
from rapid.sampling.transfer import adjusted_scores
from rapid.types import Proposal, Verdict


@dataclass(frozen=True)
class AcceptanceRule:
    """One law with its settings; see `rapid.params.Speculation` for their meaning."""

    law: Law = "exact"
    eta: float = 0.0
    alpha: float = 0.1

    @property
    def transfers(self) -> bool:
        """Whether the adjusted target differs from the target."""
        return self.law != "exact" and self.eta > 0

    def needs_draft_probs(self, greedy: bool) -> bool:
        """Whether q is used at all: greedy decoding without a transfer compares argmaxes only."""
        return self.transfers or not greedy

    def verify(
        self, target_scores: torch.Tensor, proposal: Proposal, generator: torch.Generator, *, greedy: bool
    ) -> Verdict:
        """Judge a proposal of n tokens by target scores [n + 1, V], row i at the place of draft token i."""
        num_drafted = len(proposal.token_ids)
        if target_scores.shape[0] != num_drafted + 1:
            raise ValueError(f"{num_drafted} draft tokens need {num_drafted + 1} rows of scores")
        return self._greedy(target_scores, proposal) if greedy else self._sampled(target_scores, proposal, generator)

    def _greedy(self, scores: torch.Tensor, proposal: Proposal) -> Verdict:
        """`exact`: keep while x = argmax z. `transfer`, `paper`: keep while x = argmax of the adjusted z, p and
        q at temperature 1; on rejection `transfer` emits that argmax, and `paper` argmax z, which is the limit
        of its residual for temperature 0."""
        choices = scores.argmax(-1).tolist()
        accept = choices
        if self.transfers and proposal.token_ids:
            drafted = scores[:-1]
            draft_probs = _dense_probs(proposal, drafted)
            adjusted = adjusted_scores(drafted, drafted.softmax(-1), draft_probs, self.eta, self.alpha)
            accept = adjusted.argmax(-1).tolist()
        for i, token in enumerate(proposal.token_ids):
            if token != accept[i]:
                return Verdict(i, accept[i] if self.law == "transfer" else choices[i], "residual")
        return Verdict(len(proposal.token_ids), choices[-1], "bonus")

    def _sampled(self, scores: torch.Tensor, proposal: Proposal, generator: torch.Generator) -> Verdict:
        probs = scores.softmax(-1)
        num_drafted = len(proposal.token_ids)
        if num_drafted:
            target_probs = probs[:-1]
            draft_probs = _dense_probs(proposal, target_probs)
            accept_probs = target_probs
            if self.transfers:
                accept_probs = adjusted_scores(scores[:-1], target_probs, draft_probs, self.eta, self.alpha).softmax(-1)
            rows = torch.arange(num_drafted, device=scores.device)
            drafted = torch.tensor(proposal.token_ids, device=scores.device)
            ratio = accept_probs[rows, drafted].double() / draft_probs[rows, drafted].double()
            # Uniforms in float64 on the generator's device; strictly below, so that ratio 0 never accepts.
            uniform = torch.rand(num_drafted, dtype=torch.float64, generator=generator, device=generator.device)
            kept = (uniform.to(scores.device) < ratio).tolist()
            if not all(kept):
                i = kept.index(False)
                weights = self.residual(target_probs[i], draft_probs[i], accept_probs[i])
                return Verdict(i, draw(weights, generator), "residual")
        return Verdict(num_drafted, draw(probs[-1], generator), "bonus")

    def residual(
        self, target_probs: torch.Tensor, draft_probs: torch.Tensor, accept_probs: torch.Tensor
    ) -> torch.Tensor:
        """Unnormalised residual [V] of one position, from p, q and the distribution accepted against.

        It sums to zero only when rounding is all that is left of a rejection (p = q): then what is accepted
        against is itself the right law to draw from.
        """
        if self.law == "paper":
            weights = target_probs - torch.minimum(accept_probs, draft_probs)
        else:
            weights = accept_probs - draft_probs
        weights = weights.clamp_min(0)
        if bool(weights.sum() > 0):
            return weights
        return target_probs if self.law == "paper" else accept_probs


def draw(weights: torch.Tensor, generator: torch.Generator) -> int:
    """One index drawn in proportion to non-negative weights [V]."""
    return int(torch.multinomial(weights.to(generator.device), 1, generator=generator))


def _dense_probs(proposal: Proposal, like: torch.Tensor) -> torch.Tensor:
    """q [n, V] of a proposal, one-hot where its tokens were certain."""
    if proposal.probs is not None:
        return proposal.probs.to(like.device)  # a drafter may live on another device
    drafted = torch.tensor(proposal.token_ids, device=like.device)[:, None]
    return torch.zeros_like(like).scatter_(-1, drafted, 1.0)
