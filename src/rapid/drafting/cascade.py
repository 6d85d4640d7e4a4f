"""Several drafters of one answer: free lookups first, a model where the text has not been seen before.

Which drafter speaks depends on the emitted tokens (and on timings) only, never on the target's verdict about the
draft at hand, so each round is a round of ordinary speculative decoding and the law `exact` stays exact. It is
built for that law alone.

A draft may also end early where the drafter is unsure (`min_draft_prob` of a model drafter). Let N be the length
of the draft. Stopping AFTER the unsure token makes {N >= i} a function of x_1 .. x_(i-1) alone. Given those,
x_i is still drawn from q, so the position follows the law of a drafted position: p under `exact`. Where N < i
the target draws the token from p. Either way p: `exact` stays lossless, at any temperature.
Dropping the unsure token itself makes {N >= i} depend on x_i, and what is kept is biased. With p = q = (.9, .1)
and the second token dropped as unsure, the first comes out with .9 + .1 * .9 = .99. (Greedy `exact`
is safe with either rule: the draft decides nothing but how much is drafted.)
Under `transfer` and `paper` a drafted position follows another law than p, a token without a draft follows p.
Stopping early therefore moves tokens from one law to the other, the unsure ones, which are those the transfer
is for: the option is off for these laws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rapid.drafting.base import Drafter
from rapid.errors import InvalidParameter
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.models.base import ProgressFn
    from rapid.sampling.warp import Warp


class CascadeDrafter:
    """Asks `drafters` in their order until one has something to propose; every one follows the output.

    A model drafter reads what was emitted while it was not asked when it next drafts.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        if not drafters:
            raise InvalidParameter("a cascade needs at least one drafter")
        self.drafters = dict(drafters)

    def start(self, progress: ProgressFn | None = None) -> None:
        for drafter in self.drafters.values():
            drafter.start(progress)

    def propose(self, num_tokens: int, warp: Warp, generator: torch.Generator, *, need_probs: bool) -> Proposal:
        for drafter in self.drafters.values():
            proposal = drafter.propose(num_tokens, warp, generator, need_probs=need_probs)
            if proposal.token_ids:
                return proposal
        return Proposal([])

    def commit(self, token_ids: Sequence[int]) -> None:
        for drafter in self.drafters.values():
            drafter.commit(token_ids)
