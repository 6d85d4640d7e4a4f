"""Which drafter to ask, and for how many tokens: the choice that maximises expected tokens per second.

Everything is counted in plain decode steps of the target ("steps" below), so a machine that slows down as a
whole changes no decision:

  r(n)     a verify of n tokens, in steps; r(1) = 1.
  d        a drafted token, in steps, per drafter.
  beta_i   the chance that draft token i is kept when those before it were, per drafter and match bucket.
  value    (1 + sum_i beta_1 .. beta_i) / (gamma d + r(gamma + 1)): tokens per step; plain decoding is 1.

A round may be speculative only while the whole answer, with this round a total failure, would still be
within `max_loss` of plain decoding: what earlier rounds gained is the capital later ones may risk (a
conservative bandit; Wu, Shariff, Lattimore, Szepesvari, ICML 2016). So a drafter that never helps costs at
most `max_loss`, in short answers too, and one that helps is used at full length after a few rounds.

Times are arguments and nothing is random: the same observations give the same choices. Which tokens come out
is none of this module's business; the acceptance rule keeps every choice lossless.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

# Draft lengths tried. Few of them, so that each gathers evidence quickly.
LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
# An answer is taken to have at least this many tokens when its first risk is weighed.
SHORTEST_ANSWER = 16
# After this many speculative rounds one plain step is made, to keep the unit of all costs honest.
ROUNDS_BETWEEN_PLAIN = 32
# A verify of n tokens before any was timed: 1 + 0.25 (n - 1) steps, more than a good kernel takes.
VERIFY_SLOPE = 0.25
WINDOW = 9  # rounds whose median is the present length of a step
SAMPLES = 15  # observations kept per cost
CAUTION = 0.5  # standard errors of the timings added to the cost of a speculative round
DECAY = 0.97  # weight of an observation per round that passes
PRIOR_WEIGHT = 2.0  # observations that a prior counts for
CARRIED_WEIGHT = 6.0  # observations that all of an earlier answer count for
POSITIONS = (1, 2, 4)  # first draft positions of the classes that share one beta: 1 | 2, 3 | 4 and later


@dataclass(frozen=True)
class Choice:
    """What to do in the next round; `drafter` is None, and the length 0, for a plain step."""

    drafter: str | None
    num_draft_tokens: int


PLAIN = Choice(None, 0)


class Costs:
    """Seconds, as medians over recent rounds (a stall on a shared machine moves no median), and in steps."""

    def __init__(self, draft_costs: Mapping[str, float]) -> None:
        self._verify_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._draft_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._draft = dict(draft_costs)
        self._verify: dict[int, float] = {}
        self._line = (0.0, VERIFY_SLOPE)
        self._caution = 0.0
        self.plain_rounds = 0
        self.since_plain = 0

    @property
    def step_s(self) -> float:
        """Seconds of a plain step; 0 before one was timed."""
        return median(self._verify_s[1]) if self.plain_rounds else 0.0

    def calibrate(self, verify_s: Mapping[int, list[float]], draft_s: Mapping[str, list[float]]) -> None:
        for size, times in verify_s.items():
            self._verify_s[size].extend(times)
        for name, times in draft_s.items():
            self._draft_s[name].extend(times)
        self.plain_rounds += len(verify_s.get(1, ()))
        if self.plain_rounds:
            self._update()

    def observe(self, drafter: str | None, drafted: int, draft_s: float, verify_s: float) -> None:
        """A round that drafted `drafted` tokens in `draft_s` and verified them (and one more) in `verify_s`."""
        if drafted == 0:
            self.plain_rounds += 1
            self.since_plain = 0
        else:
            self.since_plain += 1
            if drafter is not None:
                self._draft_s[drafter].append(draft_s / drafted)
        self._verify_s[drafted + 1].append(verify_s)
        if self.plain_rounds:
            self._update()

    def _update(self) -> None:
        step = self.step_s
        self._draft.update({name: median(times) / step for name, times in self._draft_s.items()})
        blocks = [(size, len(t), median(t) / step) for size, t in self._verify_s.items() if size > 1]
        self._line = _line(blocks)
        # A size timed a few times leans on the line through all sizes.
        self._verify = {
            size: (count * ratio + PRIOR_WEIGHT * self._on_line(size)) / (count + PRIOR_WEIGHT)
            for size, count, ratio in blocks
        }
        spread = 1.5 * median(abs(s - step) for s in self._verify_s[1]) / step
        count = min(len(self._verify_s[1]), sum(count for _, count, _ in blocks))
        self._caution = CAUTION * spread / math.sqrt(count) if count else 0.0

    def verify(self, size: int) -> float:
        """r(size)."""
        if size == 1:
            return 1.0
        return max(1.0, self._verify.get(size, self._on_line(size)))

    def _on_line(self, size: int) -> float:
        jump, slope = self._line
        return 1 + jump + slope * (size - 1)

    def round(self, drafter: str | None, drafted: int) -> float:
        """One whole round, drafting and verifying, with a margin for what noisy timings leave unknown."""
        if drafter is None or drafted == 0:
            return 1.0
        return (self._draft[drafter] * drafted + self.verify(drafted + 1)) * (1 + self._caution)

    def explain(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "verify_steps": {n: round(self.verify(n), 3) for n in sorted(self._verify_s)},
            "draft_steps": {name: round(d, 4) for name, d in self._draft.items()},
        }


def _line(blocks: list[tuple[int, int, float]]) -> tuple[float, float]:
    """(jump, slope) of r(n) = 1 + jump + slope (n - 1) by weighted least squares over (size, count, ratio),
    held to (0, VERIFY_SLOPE) by the weights below: a dear first extra token is a jump rather than a slope."""
    jump_weight, slope_weight = 0.5, 4.0
    a = jump_weight + sum(count for _, count, _ in blocks)
    b = float(sum(count * (size - 1) for size, count, _ in blocks))
    c = slope_weight + sum(count * (size - 1) ** 2 for size, count, _ in blocks)
    rest = [(size - 1, count, ratio - 1 - VERIFY_SLOPE * (size - 1)) for size, count, ratio in blocks]
    u = sum(count * y for _, count, y in rest)
    v = sum(count * x * y for x, count, y in rest)
    determinant = a * c - b * b
    return (c * u - b * v) / determinant, VERIFY_SLOPE + (a * v - b * u) / determinant


class Acceptance:
    """Per class of draft positions, how often a draft token was kept when those before it were.

    With a parent, its estimate is the prior of each class: buckets of match length learn from one another.
    """

    def __init__(self, prior: float, parent: Acceptance | None = None) -> None:
        self._prior = prior
        self._parent = parent
        self._kept = [0.0] * len(POSITIONS)
        self._lost = [0.0] * len(POSITIONS)

    def observe(self, drafted: int, accepted: int) -> None:
        for i in range(1, accepted + 1):
            self._kept[_position_class(i)] += 1
        if accepted < drafted:
            self._lost[_position_class(accepted + 1)] += 1

    def scale(self, factor: float) -> None:
        self._kept = [factor * n for n in self._kept]
        self._lost = [factor * n for n in self._lost]

    @property
    def weight(self) -> float:
        """Observations behind the estimate, after decay."""
        return sum(self._kept) + sum(self._lost)

    def beta(self, position_class: int) -> float:
        """The posterior mean of beta for that class."""
        if self._parent is not None:
            prior = self._parent.beta(position_class)
        else:
            total = self.weight + PRIOR_WEIGHT
            prior = (sum(self._kept) + PRIOR_WEIGHT * self._prior) / total
        kept, lost = self._kept[position_class], self._lost[position_class]
        return (kept + PRIOR_WEIGHT * prior) / (kept + lost + PRIOR_WEIGHT)

    def deviation(self, position_class: int) -> float:
        """The posterior standard deviation of beta for that class."""
        mean = self.beta(position_class)
        weight = self._kept[position_class] + self._lost[position_class] + PRIOR_WEIGHT
        return math.sqrt(mean * (1 - mean) / (weight + 1))

    def expected_tokens(self, length: int, optimism: float = 0.0) -> list[float]:
        """Expected tokens of rounds that draft 1 .. `length` tokens, each beta `optimism` deviations up."""
        betas = [min(1.0, self.beta(c) + optimism * self.deviation(c)) for c in range(len(POSITIONS))]
        tokens, survival, expected = 1.0, 1.0, []
        for i in range(1, length + 1):
            survival *= betas[_position_class(i)]
            tokens += survival
            expected.append(tokens)
        return expected


class Governor:
    """Chooses a drafter and a draft length for each round of an answer.

    draft_costs       drafter name -> guess of what a drafted token costs, in steps (0 for a lookup).
    max_draft_tokens  longest draft.
    max_loss          share of the time of plain decoding that may be lost in an answer.
    prior_acceptance  guess of beta before anything was drafted.
    """

    def __init__(
        self,
        draft_costs: Mapping[str, float],
        *,
        max_draft_tokens: int = 16,
        max_loss: float = 0.025,
        prior_acceptance: float = 0.6,
    ) -> None:
        self._costs = Costs(draft_costs)
        self._lengths = [n for n in LENGTHS if n <= max_draft_tokens]
        self._max_loss = max_loss
        self._pooled = {name: Acceptance(prior_acceptance) for name in draft_costs}
        self._buckets: dict[tuple[str, int], Acceptance] = {}
        self._prior = prior_acceptance
        self.next_answer()

    def next_answer(self) -> None:
        """Start an answer: costs are those of the same machine, acceptance is kept as a weak prior."""
        for acceptance in (*self._pooled.values(), *self._buckets.values()):
            acceptance.scale(min(1.0, CARRIED_WEIGHT / max(acceptance.weight, 1e-9)))
        self._rounds: Counter[tuple[str | None, int]] = Counter()
        self._tokens = 0
        self._trace: list[tuple[str | None, int]] = []
        self._bucket: dict[str, int] = {}

    def calibrate(self, verify_s: Mapping[int, list[float]], draft_s: Mapping[str, list[float]]) -> None:
        """Seconds measured outside any answer: of verifying n tokens (1 for a plain step), by n, and of one
        drafted token, by drafter. Without it the first answer pays for learning them."""
        self._costs.calibrate(verify_s, draft_s)

    def choose(self, remaining: int, matches: Mapping[str, int]) -> Choice:
        """The next round, when at most `remaining` tokens may still be emitted.

        `matches` names the drafters that have something to propose now, each with the length of the match
        its proposal rests on (0 for a model, which has none).
        """
        self._bucket = {name: length.bit_length() for name, length in matches.items()}
        if self._costs.plain_rounds < 3 or self._costs.since_plain >= min(
            ROUNDS_BETWEEN_PLAIN, 2 * self._costs.plain_rounds
        ):
            return PLAIN
        affordable = self._capital()
        for optimism in (0.0, 1.0):  # what is expected to gain; else what might, to find out
            best, best_value = PLAIN, 1.0
            for choice, value in self._candidates(remaining, affordable, optimism):
                if value > best_value:
                    best, best_value = choice, value
            if best is not PLAIN:
                break
        return best

    def observe(self, choice: Choice, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """What came of `choice`: tokens drafted and accepted, seconds of drafting and of verifying."""
        self._costs.observe(choice.drafter, drafted, draft_s, verify_s)
        for acceptance in (*self._pooled.values(), *self._buckets.values()):
            acceptance.scale(DECAY)
        if choice.drafter is not None and drafted > 0:
            self._pooled[choice.drafter].observe(drafted, accepted)
            self._acceptance(choice.drafter).observe(drafted, accepted)
        self._rounds[choice.drafter, drafted] += 1
        self._tokens += accepted + 1
        self._trace.append((choice.drafter, drafted))

    def explain(self) -> dict[str, Any]:
        """The estimates behind the choices, and the draft length of each round of this answer."""
        return {
            "num_draft_tokens": [drafted for _, drafted in self._trace],
            "drafters": [drafter for drafter, _ in self._trace],
            "acceptance": {
                name: [round(a.beta(c), 3) for c in range(len(POSITIONS))] for name, a in self._pooled.items()
            },
            "gained_steps": round(self._gained(), 3),
            **self._costs.explain(),
        }

    def _candidates(self, remaining: int, affordable: float, optimism: float) -> Iterator[tuple[Choice, float]]:
        for name in self._bucket:
            expected = self._acceptance(name).expected_tokens(self._lengths[-1], optimism)
            for length in self._lengths:
                cost = self._costs.round(name, length)
                if length < remaining and cost - 1.0 <= affordable:
                    yield Choice(name, length), expected[length - 1] / cost

    def _capital(self) -> float:
        """Steps that the next round may lose."""
        return self._gained() + self._max_loss * max(self._tokens, SHORTEST_ANSWER)

    def _gained(self) -> float:
        """Steps saved so far in this answer, by today's estimates of what its rounds cost."""
        spent = sum(count * self._costs.round(*kind) for kind, count in self._rounds.items())
        return self._tokens - spent

    def _acceptance(self, name: str) -> Acceptance:
        key = (name, self._bucket.get(name, 0))
        if key not in self._buckets:
            self._buckets[key] = Acceptance(self._prior, self._pooled[name])
        return self._buckets[key]


def _position_class(position: int) -> int:
    return sum(position >= first for first in POSITIONS) - 1
