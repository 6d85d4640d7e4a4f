"""Who decides what is drafted in a round: a fixed drafter and length, or the governor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rapid.decode.governor import PLAIN, Choice
from rapid.drafting.base import Prior


class Controller(Protocol):
    """Chooses before each round and learns from it; see `rapid.decode.governor.Governor`."""

    def choose(self, remaining: int, outlooks: Mapping[str, Sequence[Prior]]) -> Choice:
        """The next round, when at most `remaining` tokens may still be emitted; `outlooks` holds the
        drafters that may have something to propose."""
        ...

    def observe(self, choice: Choice, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """What came of it."""
        ...

    def explain(self) -> dict[str, Any]:
        """What the choices rested on, for the stats."""
        ...


@dataclass(frozen=True)
class FixedDraft:
    """Always the same drafter and length; None drafts nothing."""

    drafter: str | None = None
    num_draft_tokens: int = 0

    def choose(self, remaining: int, outlooks: Mapping[str, Sequence[Prior]]) -> Choice:
        if self.drafter not in outlooks:
            return PLAIN
        return Choice(self.drafter, self.num_draft_tokens)

    def observe(self, choice: Choice, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        pass

    def explain(self) -> dict[str, Any]:
        return {}
