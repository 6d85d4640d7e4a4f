"""What the governor learns from rounds: costs, in plain decode steps, and acceptance.

Pure arithmetic on numbers it is given: no clock, no randomness, no models.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import Any

from rapid.drafting.base import Prior

# A verify of n tokens before any was timed: 1 + 0.2 (n - 1) steps, more than our kernels take (0.1 to 0.15).
VERIFY_SLOPE = 0.2
NEARBY = 7  # plain steps whose median is the present length of a step
SAMPLES = 15  # observations kept per cost
MOST_SURPRISE = 1.5  # a timing further off its estimate than this factor counts as this far
CAUTION = 0.25  # standard errors of the timings added to the cost of a speculative round
PRIOR_WEIGHT = 2.0  # timings that the line through all sizes counts for


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
    """Per class of a drafter's tokens, how often one was kept when those before it were."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, float]] = {}  # kept and lost

    def observe(self, priors: Sequence[Prior], accepted: int) -> None:
        """The first `accepted` tokens of a draft of these classes were kept; the next one, if any, was not."""
        for i, prior in enumerate(priors[: accepted + 1]):
            kept, lost = self._seen.get(prior.kind, (0.0, 0.0))
            self._seen[prior.kind] = (kept + 1, lost) if i < accepted else (kept, lost + 1)

    def fade(self, factor: float) -> None:
        """Give every observation this share of its weight."""
        self._seen = {kind: (factor * kept, factor * lost) for kind, (kept, lost) in self._seen.items()}

    def limit(self, weight: float) -> None:
        """Let the observations of a class count for at most `weight` of them."""
        for kind, (kept, lost) in self._seen.items():
            factor = min(1.0, weight / max(kept + lost, 1e-9))
            self._seen[kind] = (factor * kept, factor * lost)

    def beta(self, prior: Prior, optimism: float = 0.0) -> float:
        """The posterior mean of beta for that class, and `optimism` standard deviations."""
        kept, lost = self._seen.get(prior.kind, (0.0, 0.0))
        kept, lost = kept + prior.kept, lost + prior.lost
        mean = kept / (kept + lost)
        return min(1.0, mean + optimism * math.sqrt(mean * (1 - mean) / (kept + lost + 1)))

    def expected_tokens(self, priors: Sequence[Prior], optimism: float = 0.0) -> list[float]:
        """Expected tokens of rounds that draft the first 1, 2, ... tokens of such a draft."""
        tokens, survival, expected = 1.0, 1.0, []
        for prior in priors:
            survival *= self.beta(prior, optimism)
            tokens += survival
            expected.append(tokens)
        return expected

    def explain(self) -> dict[str, tuple[float, float]]:
        """Of each class seen, the share that was kept and the observations behind it."""
        seen = {kind: (kept, kept + lost) for kind, (kept, lost) in self._seen.items() if kept + lost > 0}
        return {str(kind): (round(kept / n, 3), round(n, 1)) for kind, (kept, n) in seen.items()}
