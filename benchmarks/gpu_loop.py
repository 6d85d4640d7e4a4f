"""A greedy decode loop that stays on the device: one read-back per round, none per token.

It is `rapid.decode.loop` for block runners and device-side verdicts. With `SyntheticAcceptance` the forwards and the
acceptance kernels are real, and a seeded verdict replaces how many tokens are kept: random weights accept nothing.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rapid.decode.control import Controller
from rapid.drafting.base import MODEL_OUTLOOK
from rapid.models.graphs import BLOCK_BUCKETS, BlockRunner
from rapid.sampling.device import verify_block
from rapid.sampling.verify import AcceptanceRule


class Timer(Protocol):
    """Marks moments in the device's work; seconds between two of them, once the device has passed both."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostTimer:
    """For a CPU, whose work is done when a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventTimer:
    """CUDA events: neither marking nor reading them makes the device wait."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


class SyntheticAcceptance:
    """How many of a draft's tokens are kept: each with the same chance if those before it were. Seeded."""

    def __init__(self, per_token: float, seed: int) -> None:
        self.per_token = per_token
        self._random = random.Random(seed)

    def __call__(self, num_drafted: int) -> int:
        return next((i for i in range(num_drafted) if self._random.random() >= self.per_token), num_drafted)

    def rate(self, num_drafted: int) -> float:
        """Expected accepted / drafted."""
        return sum(self.per_token**i for i in range(1, num_drafted + 1)) / num_drafted


# Tokens in the largest block there is a graph for.
MOST = BLOCK_BUCKETS[-1]


@dataclass
class Run:
    """What a decoding did. `seconds` is the whole loop's, by the host's clock."""

    token_ids: list[int] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    draft_lengths: Counter[int] = field(default_factory=Counter)


def decode(
    target: BlockRunner,
    drafter: BlockRunner | None,
    pending: int,
    num_tokens: int,
    rule: AcceptanceRule,
    controller: Controller,
    timer: Timer,
    synthetic: Callable[[int], int] | None = None,
) -> Run:
    """Emit at least `num_tokens` tokens after `pending`, which neither cache holds yet."""
    run = Run()
    unread = [pending]  # emitted tokens the drafter has not read
    start = time.perf_counter()
    while len(run.token_ids) < num_tokens:
        # Written to the device while it is idle: behind queued work the host would wait.
        pending_ids = _ids(target, [pending])
        feeds = [_ids(target, unread[i : i + MOST]) for i in range(0, len(unread), MOST)]
        began = timer.mark()
        outlooks = {"model": MODEL_OUTLOOK} if drafter is not None else {}
        remaining = num_tokens - len(run.token_ids)
        choice = controller.choose(remaining, outlooks)
        gamma = min(choice.num_draft_tokens, remaining - 1)
        drafted, probs = _draft(drafter, feeds, gamma, rule) if drafter and gamma else (pending_ids[:0], None)
        was_drafted = timer.mark()

        kept_length = target.cache.length + 1
        logits = target.run(torch.cat((pending_ids, drafted)))
        verdict = verify_block(rule, logits, drafted, probs)
        summary = torch.stack((verdict.num_accepted, verdict.next_token, verdict.valid.long()))
        ended = timer.mark()
        # The one place where the host waits for the device.
        *token_ids, num_accepted, next_token, valid = torch.cat((drafted, summary)).tolist()
        if not valid:
            raise ValueError("the model returned NaN or infinite logits")
        if synthetic is not None:
            num_accepted = synthetic(gamma)

        target.cache.rewind(kept_length + num_accepted)
        if drafter and gamma:
            # Drafting read all but the last draft token; what was rejected is forgotten.
            drafter.cache.rewind(drafter.cache.length - max(0, gamma - 1 - num_accepted))
            unread = token_ids[-1:] if num_accepted == gamma else []
        pending = next_token
        unread.append(pending)
        run.token_ids += [*token_ids[:num_accepted], pending]
        run.rounds += 1
        run.drafted += gamma
        run.accepted += num_accepted
        run.draft_lengths[gamma] += 1
        controller.observe(
            choice, gamma, num_accepted, timer.seconds(began, was_drafted), timer.seconds(was_drafted, ended)
        )
    run.seconds = time.perf_counter() - start
    return run


def _draft(
    drafter: BlockRunner, feeds: list[torch.Tensor], gamma: int, rule: AcceptanceRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read `feeds` and draft: tokens [gamma] and, where needed, q [gamma, V]; nothing is waited for."""
    drafted = torch.empty(gamma, dtype=torch.int64, device=drafter.decoder.device)
    probs: list[torch.Tensor] = []
    *earlier, feed = feeds
    for block in earlier:  # there are some only where the drafter was not asked for long
        drafter.run(block)
    for i in range(gamma):
        logits = drafter.run(feed)[-1]
        drafted[i] = logits.argmax()
        if rule.needs_draft_probs(greedy=True):
            probs.append(logits.softmax(-1))
        feed = drafted[i : i + 1]
    return drafted, torch.stack(probs) if probs else None


def _ids(runner: BlockRunner, token_ids: list[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=runner.decoder.device)
