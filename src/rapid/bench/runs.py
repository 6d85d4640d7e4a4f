"""One answer of one method, as it was measured, whoever gave it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Seconds and counts. `decode_s` spans all emitted tokens, the last prompt token's forward pass included, and
    nothing that is read before; draft_s + verify_s + other_s = decode_s.

    prefill_s  reading the whole target prompt.
    ttft_s     from the question on a closed document to its first token, loading excluded.
    """

    token_ids: list[int]
    prefill_s: float
    ttft_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    rounds: int
    drafted: int
    accepted: int
    peak_rss_bytes: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Emitted tokens per second of decoding."""
        return len(self.token_ids) / self.decode_s

    @property
    def other_s(self) -> float:
        """Decoding outside the models' forward passes."""
        return max(0.0, self.decode_s - self.draft_s - self.verify_s)
