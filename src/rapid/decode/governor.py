"""Which drafter to ask, and for how many tokens: the choice that maximises expected tokens per second.

Everything is counted in plain decode steps of the target ("steps" below), so a machine that slows down as a
whole changes no decision:

  r(n)     a verify of n tokens, in steps; r(1) = 1.
  d        a drafted token, in steps, per drafter.
  beta_i   the chance that draft token i is kept when those before it were, per drafter and class of token.
  value    (1 + sum_i beta_1 .. beta_i) / (gamma d + r(gamma + 1)): tokens per step; plain decoding is 1.

A round may be speculative only while the whole answer, with this round a total failure, would still be
within `max_loss` of plain decoding and a fraction of a step: what earlier rounds gained is the capital later
ones may risk (a conservative bandit; Wu, Shariff, Lattimore, Szepesvari, ICML 2016). So a drafter that never
helps costs at most that, and one that helps is used at full length after a few rounds.

Times are arguments and nothing is random: the same observations give the same choices. Which tokens come out
is none of this module's business; the acceptance rule keeps every choice lossless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapid.decode.estimates import Acceptance, Costs
from rapid.drafting.base import LONGEST_DRAFT, Prior
from rapid.errors import InvalidParameter

# Draft lengths tried. Few of them, so that each gathers evidence quickly.
LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
# Steps that any answer may lose, besides the share of its length: the first drafts have to be paid from something.
LOSS_AT_START = 0.4
# Plain steps made before anything is drafted where the costs are unknown.
FIRST_PLAIN = 2
# After this many speculative rounds (fewer in the beginning) a plain step keeps the unit of all costs honest.
ROUNDS_BETWEEN_PLAIN = 32
PROBE_SHARE = 0.6  # part of the allowed loss that may go into drafts not expected to gain
PROBE_LENGTH = 2  # longest of those drafts
DECAY = 0.97  # weight of an observation of acceptance per round that passes
CARRIED_WEIGHT = 3.0  # observations of a class that all earlier answers count for


@dataclass(frozen=True)
class Choice:
    """What to do in the next round; `drafter` is None, and the length 0, for a plain step."""

    drafter: str | None
    num_draft_tokens: int


PLAIN = Choice(None, 0)


class Governor:
    """Chooses a drafter and a draft length for each round of an answer.

    draft_costs       drafter name -> guess of what a drafted token costs, in steps (0 for a lookup).
    max_draft_tokens  longest draft.
    max_loss          share of the time of plain decoding that may be lost in an answer, besides `LOSS_AT_START`.
    """

    def __init__(
        self, draft_costs: Mapping[str, float], *, max_draft_tokens: int = LONGEST_DRAFT, max_loss: float = 0.015
    ) -> None:
        if max_draft_tokens < 1:
            raise InvalidParameter("a governor needs max_draft_tokens of at least 1; without it use no drafter")
        self._costs = Costs(draft_costs)
        self._lengths = [n for n in LENGTHS if n <= max_draft_tokens]
        self._max_loss = max_loss
        self._acceptance = {name: Acceptance() for name in draft_costs}
        self.next_answer()

    def next_answer(self) -> None:
        """Start an answer: costs are those of the same machine, acceptance is kept as a weak prior."""
        for acceptance in self._acceptance.values():
            acceptance.limit(CARRIED_WEIGHT)
        self._rounds: Counter[tuple[str | None, int]] = Counter()
        self._tokens = 0
        self._trace: list[tuple[str | None, int]] = []
        self._outlooks: Mapping[str, Sequence[Prior]] = {}

    def calibrate(self, verify_s: Mapping[int, list[float]], draft_s: Mapping[str, list[float]]) -> None:
        """Seconds measured outside any answer: of verifying n tokens (1 for a plain step), by n, and of one
        drafted token, by drafter. Without it the first answer pays for learning them."""
        self._costs.calibrate(verify_s, draft_s)

    def choose(self, remaining: int, outlooks: Mapping[str, Sequence[Prior]]) -> Choice:
        """The next round, when at most `remaining` tokens may still be emitted.

        `outlooks` names the drafters that have something to propose now, each with the classes of the tokens it
        would propose (of a lookup, by the length of its match; of a model, by position): acceptance is learnt
        per class.
        """
        self._outlooks = outlooks
        plain_rounds = self._costs.plain_rounds
        if plain_rounds < FIRST_PLAIN or self._costs.since_plain >= min(ROUNDS_BETWEEN_PLAIN, 2 * plain_rounds):
            return PLAIN
        gained = self._gained()
        allowance = LOSS_AT_START + self._max_loss * self._tokens
        # What is expected to gain; else, with part of the allowance, what might: to find out.
        best = self._best(remaining, gained + allowance)
        if best is PLAIN:
            best = self._best(remaining, gained + PROBE_SHARE * allowance, probe=True)
        return best

    def observe(self, choice: Choice, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """What came of `choice`: tokens drafted and accepted, seconds of drafting and of verifying."""
        self._costs.observe(choice.drafter, drafted, draft_s, verify_s)
        for acceptance in self._acceptance.values():
            acceptance.fade(DECAY)
        if choice.drafter is not None and drafted > 0:
            self._acceptance[choice.drafter].observe(self._outlooks[choice.drafter][:drafted], accepted)
        self._rounds[choice.drafter, drafted] += 1
        self._tokens += accepted + 1
        self._trace.append((choice.drafter, drafted))

    def explain(self) -> dict[str, Any]:
        """The estimates behind the choices, and the draft length of each round of this answer."""
        return {
            "num_draft_tokens": [drafted for _, drafted in self._trace],
            "drafters": [drafter for drafter, _ in self._trace],
            "acceptance": {name: acceptance.explain() for name, acceptance in self._acceptance.items()},
            "gained_steps": round(self._gained(), 3),
            **self._costs.explain(),
        }

    def _best(self, remaining: int, affordable: float, *, probe: bool = False) -> Choice:
        """The choice of highest value above 1 that could fail altogether and cost no more than `affordable`.

        A probe is short and valued with hope: acceptance a deviation up, costs as before any bad timing.
        """
        best, best_value = PLAIN, 1.0
        for name, priors in self._outlooks.items():
            expected = self._acceptance[name].expected_tokens(priors, float(probe))
            for length in self._lengths:
                cost = self._costs.round(name, length)
                impossible = length >= remaining or length > len(priors)
                if impossible or cost - 1.0 > affordable or (probe and length > PROBE_LENGTH):
                    break
                value = expected[length - 1] / (self._costs.hoped_round(name, length) if probe else cost)
                if value > best_value:
                    best, best_value = Choice(name, length), value
        return best

    def _gained(self) -> float:
        """Steps saved so far in this answer, by today's estimates of what its rounds cost."""
        spent = sum(count * self._costs.round(*kind) for kind, count in self._rounds.items())
        return self._tokens - spent
