"""The knowledge transfer of RAPID: the target's distribution shifted towards the drafter's (Eq. 6, 8).

    p_hat = softmax(z/T + eta * mask * (q - p)),   mask = [q >= alpha * max q]

The shift is one gradient step on KL(q || p). The mask is the released code's form of the paper's tail rule
(Eq. 9): tokens that the drafter finds improbable keep their score, and the result is normalised.
"""

from __future__ import annotations

import torch


def adjusted_scores(
    target_scores: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    eta: float,
    alpha: float,
) -> torch.Tensor:
    """Scores [n, V] of the adjusted target p_hat, from the target's scores z/T [n, V], p [n, V] and q [n, V].

    Tokens filtered out of the target (score -inf) stay out.
    """
    shift = eta * (draft_probs - target_probs)
    plausible = draft_probs >= alpha * draft_probs.amax(-1, keepdim=True)
    return torch.where(plausible, target_scores + shift, target_scores)
