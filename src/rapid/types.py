"""What travels through the system, and the glossary.

target        the language model that reads the whole document; p is its distribution.
drafter       what proposes tokens; q is its distribution. RAPID's reads only the retrieved passages.
round         one cycle: the drafter proposes, the target verifies in one forward pass, some tokens are emitted.
proposal      the drafted tokens of a round, with the distributions they were drawn from.
verdict       how many of them were kept, and the one token that follows: `residual` (drawn where a draft token
              was rejected) or `bonus` (drawn by the target after the last draft token, all of them kept).
acceptance_rate         accepted / drafted.
mean_acceptance_length  1 + accepted / rounds: tokens emitted by one target forward pass.

This module knows no model and imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

# called with (what is being done, done so far, in all) while something takes long
StageProgress = Callable[[str, int, int], None]

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Document:
    """A text and where it came from. `text` is normalised once, on reading; offsets refer to it."""

    text: str
    name: str = "document"


@dataclass(frozen=True)
class Chunk:
    """A passage: `documents[document].text[start:end] == text`, offsets in characters."""

    document: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class ScoredChunk:
    """A retrieved passage and its similarity to the query (its scale depends on the ranking)."""

    chunk: Chunk
    score: float


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens. `probs` [n, vocabulary] holds q for each; None means each was certain (q one-hot)."""

    token_ids: list[int]
    probs: torch.Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """`num_accepted` draft tokens are kept, then `next_token` is emitted."""

    num_accepted: int
    next_token: int
    kind: Literal["residual", "bonus"]


@dataclass(frozen=True)
class Round:
    """One round as the loop reports it: `token_ids` are emitted, at most `num_accepted` + 1 of them."""

    token_ids: list[int]
    num_drafted: int
    num_accepted: int
    draft_s: float
    verify_s: float
    finish_reason: FinishReason | None = None


@dataclass
class Stats:
    """Counts and seconds of one answer. `other_s` is decoding time outside model forward passes; `governor` holds
    the trace and the estimates behind the draft lengths, where they were chosen automatically."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    load_s: float = 0.0
    retrieval_s: float = 0.0
    prefill_s: float = 0.0
    draft_prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    ttft_s: float = 0.0
    completion_tokens: int = 0
    governor: dict[str, Any] = field(default_factory=dict)

    def add(self, round_: Round, seconds: float) -> None:
        """Count a round that took `seconds` in all."""
        self.rounds += 1
        self.drafted += round_.num_drafted
        self.accepted += round_.num_accepted
        self.completion_tokens += len(round_.token_ids)
        self.draft_s += round_.draft_s
        self.verify_s += round_.verify_s
        self.decode_s += seconds

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds; 0 before the first round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Emitted tokens per second of decoding, prefill and retrieval excluded."""
        return self.completion_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def other_s(self) -> float:
        """Decoding time spent outside the drafter and the target, in seconds."""
        return max(0.0, self.decode_s - self.draft_s - self.verify_s)


@dataclass(frozen=True)
class Answer:
    """A finished answer with everything needed to judge it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    method: str
    settings: dict[str, Any]
    prompt_tokens: int
    draft_prompt_tokens: int
    stats: Stats
    retrieved: list[ScoredChunk] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text
