"""The decode loop: draft, verify, accept, rewind, emit. One loop serves every method.

It knows token ids and logits; not text, retrieval, prompts or tokenizers. Without a drafter it is plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rapid.decode.control import Controller
from rapid.decode.stop import StopRule
from rapid.drafting.base import Drafter, outlooks
from rapid.models.base import TokenSequence
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import Warp
from rapid.types import Proposal, Round


@dataclass(frozen=True)
class DecodeSettings:
    """How to draw, how to accept, and what decides on drafter and draft length (gamma) of each round."""

    warp: Warp
    rule: AcceptanceRule
    controller: Controller


def decode(
    target: TokenSequence,
    prompt: Sequence[int],
    drafters: Mapping[str, Drafter],
    settings: DecodeSettings,
    stop: StopRule,
    generator: torch.Generator,
) -> Iterator[Round]:
    """Continue `prompt`, of which `target` has read all but the last token; the drafters have been started.

    Yields rounds of at least one token until the stop rule ends the answer or the window is full. All drafters
    follow what is emitted, whichever of them drafted it.
    """
    warp, rule, controller = settings.warp, settings.rule, settings.controller
    need_probs = rule.needs_draft_probs(warp.greedy)
    pending = prompt[-1]
    while True:
        start = time.perf_counter()
        # The token after the draft is always emitted: drafting more than the limit allows would be thrown away.
        room = min(stop.remaining - 1, target.window - target.length - 1)
        choice = controller.choose(room + 1, outlooks(drafters))
        proposal = Proposal([])
        if choice.drafter and (num_tokens := min(choice.num_draft_tokens, room)) > 0:
            proposal = drafters[choice.drafter].propose(num_tokens, warp, generator, need_probs=need_probs)
        drafted = time.perf_counter()

        kept = target.length + 1
        logits = target.forward([pending, *proposal.token_ids])
        verified = time.perf_counter()

        scores = warp.scores(logits, stop.emitted + proposal.token_ids)
        verdict = rule.verify(scores, proposal, generator, greedy=warp.greedy)
        emitted, reason = stop.cut([*proposal.token_ids[: verdict.num_accepted], verdict.next_token])
        num_accepted = min(verdict.num_accepted, len(emitted))

        pending = emitted[-1]
        target.rewind(kept + num_accepted)
        for drafter in drafters.values():
            drafter.commit(emitted)
        draft_s, verify_s = drafted - start, verified - drafted
        controller.observe(choice, len(proposal.token_ids), num_accepted, draft_s, verify_s)
        if reason is None and target.length >= target.window:
            reason = "length"
        yield Round(emitted, len(proposal.token_ids), num_accepted, draft_s, verify_s, reason)
        if reason:
            return
