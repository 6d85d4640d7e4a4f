"""What the governor learns from rounds: costs, in plain decode steps, and acceptance.

Pure arithmetic on numbers it is given: no clock, no randomness, no models.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median
from typing import Any

# A verify of n tokens before any was timed: 1 + 0.25 (n - 1) steps, more than a good kernel takes.
VERIFY_SLOPE = 0.25
NEARBY = 7  # plain steps whose median is the present length of a step
SAMPLES = 15  # observations kept per cost
MOST_SURPRISE = 1.5  # a timing further off its estimate than this factor counts as this far
CAUTION = 0.25  # standard errors of the timings added to the cost of a speculative round
PRIOR_WEIGHT = 2.0  # observations that a prior counts for
POSITIONS = (1, 2, 4)  # first draft positions of the classes that share one beta: 1 | 2, 3 | 4 and later


class Costs:
    """What rounds cost, in steps: each timing is divided by the plain steps made just before it, and medians
    are taken of the ratios, so neither a stall nor a slow spell of a shared machine moves them."""

    def __init__(self, draft_costs: Mapping[str, float]) -> None:
        self._steps: deque[float] = deque(maxlen=NEARBY)  # seconds of the latest plain steps
        self._verify_ratios: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._draft_ratios: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._draft = dict(draft_costs)
        self._verify: dict[int, float] = {}
        self._line = (0.0, VERIFY_SLOPE)
        self._caution = 0.0
        self.plain_rounds = 0
        self.since_plain = 0

    @property
    def step_s(self) -> float:
        """Seconds of a plain step; 0 before one was timed."""
        return median(self._steps) if self._steps else 0.0

    def calibrate(self, verify_s: Mapping[int, list[float]], draft_s: Mapping[str, list[float]]) -> None:
        for seconds in verify_s.get(1, ()):
            self.observe(None, 0, 0.0, seconds)
        if not self._steps:
            return
        for size, times in verify_s.items():
            if size > 1:
                self._verify_ratios[size].extend(t / self.step_s for t in times)
        for name, times in draft_s.items():
            self._draft_ratios[name].extend(t / self.step_s for t in times)
        self._update()

    def observe(self, drafter: str | None, drafted: int, draft_s: float, verify_s: float) -> None:
        """A round that drafted `drafted` tokens in `draft_s` and verified them (and one more) in `verify_s`."""
        if drafted == 0:
            self.plain_rounds += 1
            self.since_plain = 0
            self._steps.append(verify_s)
            return
        self.since_plain += 1
        if self._steps and drafter is not None and self.since_plain <= SAMPLES:
            # A size that looks dear is not tried again, so one stall must not make it so.
            expected = self.verify(drafted + 1)
            ratio = min(max(verify_s / self.step_s, expected / MOST_SURPRISE), expected * MOST_SURPRISE)
            self._verify_ratios[drafted + 1].append(ratio)
            self._draft_ratios[drafter].append(draft_s / drafted / self.step_s)
            self._update()

    def _update(self) -> None:
        self._draft.update({name: median(ratios) for name, ratios in self._draft_ratios.items()})
        blocks = [(size, len(r), median(r)) for size, r in self._verify_ratios.items()]
        self._line = _line(blocks)
        # A size timed a few times leans on the line through all sizes.
        self._verify = {
            size: (count * ratio + PRIOR_WEIGHT * self._on_line(size)) / (count + PRIOR_WEIGHT)
            for size, count, ratio in blocks
        }
        spread = 1.5 * median(abs(s - self.step_s) for s in self._steps) / self.step_s
        count = min(self.plain_rounds, sum(count for _, count, _ in blocks))
        self._caution = CAUTION * spread / math.sqrt(count) if count else 0.0

    def verify(self, size: int) -> float:
        """r(size)."""
        if size == 1:
            return 1.0
        return max(1.0, self._verify.get(size, 0.0), self._on_line(size))

    def _on_line(self, size: int) -> float:
        jump, slope = self._line
        return 1 + jump + slope * (size - 1)

    def round(self, drafter: str | None, drafted: int) -> float:
        """One whole round, drafting and verifying, with a margin for what noisy timings leave unknown."""
        if drafter is None or drafted == 0:
            return 1.0
        return (self._draft[drafter] * drafted + self.verify(drafted + 1)) * (1 + self._caution)

    def hoped_round(self, drafter: str, drafted: int) -> float:
        """The same without margin, and with the guess of r where timings say worse."""
        verify = min(self.verify(drafted + 1), 1 + VERIFY_SLOPE * drafted)
        return self._draft[drafter] * drafted + verify

    def explain(self) -> dict[str, Any]:
        """Seconds of a plain step; the other costs in steps."""
        return {
            "step_s": self.step_s,
            "verify_steps": {n: round(self.verify(n), 3) for n in sorted(self._verify)},
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
    jump = (c * u - b * v) / (a * c - b * b)
    if jump < 0:  # noise: it would make a short draft look free
        return 0.0, max(0.0, VERIFY_SLOPE + v / c)
    return jump, max(0.0, VERIFY_SLOPE + (v - b * jump) / c)


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


def _position_class(position: int) -> int:
    return sum(position >= first for first in POSITIONS) - 1
