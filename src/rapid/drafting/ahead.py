"""Drafting the next block while the target verifies this one, for a drafter on a device of its own.

As soon as a block is proposed, a thread drafts on: first a guess of the token that the target will add, then the block
after it. If the target keeps the whole block and adds just that token, the next proposal is there already. Otherwise
what was drafted on is thrown away, and the drafter stands where it would have stood without it.

This changes no law. Given the text before it, each token drafted ahead is drawn from the drafter's q by random numbers
of its own; whether it is used depends on the block before, on the guess and on the target, never on itself. Those
random numbers come from a seed drawn when the block is proposed, so an answer does not depend on timing either.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from rapid.drafting.model import ModelDrafter
from rapid.models.base import ProgressFn
from rapid.types import Proposal

if TYPE_CHECKING:
    import torch

    from rapid.sampling.warp import Warp

_NOTHING = Proposal([])


class AheadDrafter:
    """A `ModelDrafter` that goes on drafting while its proposal is verified. `close` it before its sequence is used
    by anything else."""

    def __init__(self, inner: ModelDrafter) -> None:
        self._inner = inner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rapid-ahead")
        self._ahead: _Ahead | None = None

    def start(self, progress: ProgressFn | None = None) -> None:
        self._inner.start(progress)

    def propose(self, num_tokens: int, warp: Warp, generator: torch.Generator, *, need_probs: bool) -> Proposal:
        import torch

        proposal = self._drafted_ahead(num_tokens)
        if not proposal.token_ids:
            proposal = self._inner.propose(num_tokens, warp, generator, need_probs=need_probs)
        # Drawn in every round, used or not: what comes after must not depend on which.
        own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
        if proposal.token_ids and not self._inner.ends(proposal.token_ids):
            self._ahead = _Ahead(self._inner, proposal.token_ids)
            self._ahead.rest = self._pool.submit(self._ahead.draft, num_tokens, warp, own, need_probs)
        return proposal

    def commit(self, token_ids: Sequence[int]) -> None:
        if self._ahead is not None and self._ahead.foresaw(token_ids):
            return
        self._throw_away()
        self._inner.commit(token_ids)

    def close(self) -> None:
        """Stop drafting ahead, and wait until the drafter's model is idle."""
        self._throw_away()
        self._pool.shutdown(wait=True)

    def _throw_away(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()

    def _drafted_ahead(self, num_tokens: int) -> Proposal:
        """What was drafted ahead of what follows now, if anything."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return _NOTHING
        made = ahead.rest.result()
        # Cut to a length that does not look at the tokens, which keeps the law.
        return Proposal(made.token_ids[:num_tokens], None if made.probs is None else made.probs[:num_tokens])


class _Ahead:
    """What is drafted beyond `block`, which the inner drafter takes as emitted meanwhile: a guess, and what follows."""

    rest: Future[Proposal]

    def __init__(self, inner: ModelDrafter, block: Sequence[int]) -> None:
        self._inner = inner
        self._block = list(block)
        self._guess: Future[list[int]] = Future()
        self._cancelled = threading.Event()
        self._came_true = False
        inner.commit(block)

    def draft(self, num_tokens: int, warp: Warp, generator: torch.Generator, need_probs: bool) -> Proposal:
        try:
            guess = self._inner.propose(1, warp, generator, need_probs=need_probs, cancelled=self._cancelled).token_ids
            self._inner.commit(guess)
            self._guess.set_result(guess)
        except BaseException as error:
            self._guess.set_exception(error)
            raise
        if not guess or self._inner.ends(guess) or self._cancelled.is_set():
            return _NOTHING
        return self._inner.propose(num_tokens, warp, generator, need_probs=need_probs, cancelled=self._cancelled)

    def foresaw(self, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids`, emitted after the block was proposed, are the block and the guess."""
        if self._came_true:  # another round has gone by since, drafted by somebody else or not at all
            return False
        self._came_true = list(token_ids[:-1]) == self._block and self._guess.result() == list(token_ids[-1:])
        return self._came_true

    def stop(self) -> None:
        """End the drafting. What was not emitted leaves the inner drafter's history; its cache is put right by the
        next `commit` or `start`. A failure of what is thrown away is no failure: whoever needs the model meets it."""
        self._cancelled.set()
        wait([self.rest])
        if not self._came_true:
            guess = [] if self._guess.exception() else self._guess.result()
            self._inner.retract(len(self._block) + len(guess))
