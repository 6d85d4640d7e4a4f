"""The governor on simulated machines: never slower than plain decoding, near the best fixed choice where
speculation pays, deterministic. Speeds are those of the choices under the machine's true costs; what the
governor sees is noisy, with outliers and slow spells. The seeds are fixed, so a pass is not a matter of luck."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass

import pytest

from rapid.decode.governor import PLAIN, Choice, Governor
from rapid.drafting.base import MODEL_OUTLOOK, Prior


@dataclass(frozen=True)
class Machine:
    """Seconds of verifying n tokens: `step` for one, on `points` between; and of one drafted token."""

    step: float
    slope: float
    draft: dict[str, float]
    jump: float = 0.0

    def verify(self, n):
        return self.step + (self.jump + self.slope * (n - 1) if n > 1 else 0.0)

    def round(self, name, n):
        return self.verify(n + 1) + (self.draft[name] * n if name else 0.0)

    def plain(self, tokens):
        return tokens * self.step

    def best(self, acceptance):
        """Speed of the best fixed choice, plain decoding being 1."""
        speeds = [1.0]
        for name in self.draft:
            for n in range(1, 17):
                tokens = sum(acceptance**i for i in range(n + 1))
                speeds.append(tokens * self.step / self.round(name, n))
        return max(speeds)


# spec: SmolLM2 at 8K with fp16 linears, a verify of 5 / 8 / 11 tokens 210 / 264 / 337 ms, a draft step 50 ms.
CPU_LOOKUP = Machine(0.125, 0.0212, {"lookup": 0.0})
CPU_MODEL = Machine(0.125, 0.0212, {"model": 0.05})
CPU_BOTH = Machine(0.125, 0.0212, {"lookup": 0.0, "model": 0.05})
# transformers: a verify of 5 tokens costs 3.2 steps; speculation hardly ever pays.
SLOW_VERIFY = Machine(0.184, 0.06, {"model": 0.09}, jump=0.16)
# 8B on an H200 at 128K: verify nearly free, a draft step half a decode step, or an eighth with a small drafter.
GPU = Machine(0.0077, 0.00002, {"model": 0.0039})
GPU_SMALL_DRAFTER = Machine(0.0077, 0.00002, {"model": 0.001})
MACHINES = [CPU_LOOKUP, CPU_MODEL, CPU_BOTH, SLOW_VERIFY, GPU, GPU_SMALL_DRAFTER]


class Timer:
    """What a clock on a shared machine shows: jitter, stalls of 2-5 times, spells at two thirds of the speed."""

    def __init__(self, rng, noise):
        self.rng, self.noise, self.slow = rng, noise, 1.0

    def __call__(self, seconds):
        if self.rng.random() < 0.05:
            self.slow = 1.5 if self.slow == 1.0 else 1.0
        jitter = math.exp(self.rng.gauss(0, self.noise))
        stall = self.rng.uniform(2, 5) if self.rng.random() < 0.05 else 1.0
        return seconds * self.slow * jitter * stall


def calibrated(machine, seed, noise, **options):
    rng = random.Random(seed + 1000)
    governor = Governor({name: 0.0 if name == "lookup" else 0.4 for name in machine.draft}, **options)
    jitter = [math.exp(rng.gauss(0, noise)) for _ in range(50)]
    governor.calibrate(
        {n: [machine.verify(n) * jitter.pop() for _ in range(5 if n == 1 else 3)] for n in (1, 2, 5, 9)},
        {name: [s * jitter.pop() for _ in range(5)] for name, s in machine.draft.items()},
    )
    return governor


def answer(governor, machine, acceptance, tokens, seed, noise):
    """Speed over plain decoding of one answer; `acceptance(position in the answer)` per token."""
    rng = random.Random(seed)
    timer = Timer(rng, noise)
    emitted, seconds, choices = 0, 0.0, []
    while emitted < tokens:
        choice = governor.choose(tokens - emitted + 100, dict.fromkeys(machine.draft, MODEL_OUTLOOK))
        drafted = choice.num_draft_tokens
        accepted = 0
        while accepted < drafted and rng.random() < acceptance(emitted):
            accepted += 1
        accepted = min(accepted, tokens - emitted - 1)
        seconds += machine.round(choice.drafter, drafted)
        draft_s = machine.draft[choice.drafter] * drafted if choice.drafter else 0.0
        governor.observe(choice, drafted, accepted, timer(draft_s), timer(machine.verify(drafted + 1)))
        emitted += accepted + 1
        choices.append(choice)
    return machine.plain(tokens) / seconds, choices


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("tokens", [20, 60, 300])
def test_useless_drafts_cost_at_most_what_may_be_lost(tokens, noise):
    for machine in MACHINES:
        for seed in range(6):
            governor = calibrated(machine, seed, noise)
            speed, _ = answer(governor, machine, lambda _: 0.0, tokens, seed, noise)
            # What may be lost is 0.4 steps and 1.5 %; timings 40 % off hide what a block costs.
            assert speed >= (0.95 if noise == 0.4 else 0.965 if tokens == 20 else 0.97), (machine, seed)


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_any_acceptance_keeps_plain_speed(noise):
    speeds = []
    for machine in MACHINES:
        for acceptance in (0.2, 0.4, 0.6, 0.8, 0.97):
            for tokens in (20, 60, 200):
                for seed in range(3):
                    governor = calibrated(machine, seed, noise)
                    speed, _ = answer(governor, machine, lambda _, a=acceptance: a, tokens, seed, noise)
                    speeds.append(speed)
    assert min(speeds) >= 0.965


@pytest.mark.parametrize("tokens", [20, 60, 300])
def test_an_answer_that_turns_after_a_good_one_is_safe_too(tokens):
    for machine in MACHINES:
        for seed in range(4):
            governor = calibrated(machine, seed, 0.1)
            answer(governor, machine, lambda _: 0.9, 100, seed, 0.1)
            governor.next_answer()
            speed, _ = answer(governor, machine, lambda _: 0.0, tokens, seed, 0.1)
            # 0.4 steps and 1.5 % may be lost, by costs that are known to a few percent.
            assert speed >= (0.95 if tokens == 20 else 0.96), (machine, seed)


def test_acceptance_that_falls_within_an_answer():
    """Sixty good tokens, then nothing is accepted: what was gained is not spent again."""
    speeds, plain = [], []
    for seed in range(10):
        governor = calibrated(CPU_LOOKUP, seed, 0.1)
        speed, choices = answer(governor, CPU_LOOKUP, lambda at: 0.9 if at < 60 else 0.0, 200, seed, 0.1)
        speeds.append(speed)
        plain.append(Counter(choices[-60:])[PLAIN])
    assert min(plain) >= 40
    assert statistics.mean(plain) >= 50
    assert min(speeds) >= 1.0
    assert statistics.mean(speeds) >= 1.03


def test_acceptance_that_rises_is_found():
    lengths = []
    for seed in range(10):
        governor = calibrated(CPU_LOOKUP, seed, 0.1)
        _, choices = answer(governor, CPU_LOOKUP, lambda at: 0.0 if at < 100 else 0.95, 300, seed, 0.1)
        lengths.append(statistics.mean(c.num_draft_tokens for c in choices[-10:]))
    assert min(lengths) >= 3
    assert statistics.mean(lengths) > 6


@pytest.mark.parametrize("machine", [CPU_LOOKUP, CPU_MODEL, CPU_BOTH, GPU, GPU_SMALL_DRAFTER])
@pytest.mark.parametrize("acceptance", [0.8, 0.9, 0.97])
def test_near_the_best_fixed_choice(machine, acceptance):
    """Over 200 tokens of a first answer, its ramp included, and more closely in the mean of all machines below."""
    speeds = [
        answer(calibrated(machine, seed, 0.1), machine, lambda _: acceptance, 200, seed, 0.1)[0] for seed in range(8)
    ]
    assert statistics.mean(speeds) >= 0.8 * machine.best(acceptance)


def test_near_the_best_fixed_choice_in_the_mean():
    shares = [
        answer(calibrated(machine, seed, 0.05), machine, lambda _, a=a: a, 200, seed, 0.05)[0] / machine.best(a)
        for machine in (CPU_LOOKUP, CPU_MODEL, GPU, GPU_SMALL_DRAFTER)
        for a in (0.8, 0.9, 0.97)
        for seed in range(5)
    ]
    assert statistics.mean(shares) >= 0.88


def test_the_control_a_fixed_draft_loses_where_the_governor_does_not():
    """Ten tokens a round at acceptance 0.5 on the CPU."""
    tokens = sum(0.5**i for i in range(11))
    assert tokens * CPU_MODEL.step / CPU_MODEL.round("model", 10) < 0.5
    speed, _ = answer(calibrated(CPU_MODEL, 0, 0.1), CPU_MODEL, lambda _: 0.5, 100, 0, 0.1)
    assert speed >= 0.97


def test_classes_of_tokens_are_told_apart():
    """Long matches are always right, short ones never: only the long ones are drafted in the end."""
    governor = calibrated(CPU_LOOKUP, 0, 0.0)
    late = []
    for i in range(200):
        kind = "long" if i % 3 == 0 else "short"
        choice = governor.choose(1000, {"lookup": [Prior(kind, 1.0, 1.0)] * 12})
        drafted = choice.num_draft_tokens
        accepted = drafted if kind == "long" else 0
        governor.observe(choice, drafted, accepted, 0.0, CPU_LOOKUP.verify(drafted + 1))
        if i >= 100:
            late.append((kind, drafted))
    assert statistics.mean(n for b, n in late if b == "long") > 8
    assert statistics.mean(n for b, n in late if b == "short") < 1
    assert governor.explain()["acceptance"]["lookup"]["long"][0] > 0.99


def test_what_is_known_of_a_class_beforehand_is_used_at_once():
    """A draft ends before the first token that is not worth its cost, and no later than there are tokens."""
    sure, unsure = Prior("sure", 8.0, 0.5), Prior("unsure", 0.5, 8.0)

    def drafted(outlook):
        return calibrated(CPU_LOOKUP, 0, 0.0).choose(1000, {"lookup": outlook}).num_draft_tokens

    assert drafted([sure] * 12) == 2  # as much as may be lost
    assert drafted([sure]) == 1
    assert drafted([sure, unsure, unsure]) == 1
    assert drafted([unsure] * 12) == 0


def test_begins_plainly_when_nothing_was_timed():
    governor = Governor({"model": 0.4})
    for _ in range(2):
        assert governor.choose(100, {"model": MODEL_OUTLOOK}) == PLAIN
        governor.observe(PLAIN, 0, 0, 0.0, 0.1)


def test_asks_only_for_what_is_there_and_what_is_left():
    governor = calibrated(GPU_SMALL_DRAFTER, 0, 0.0, max_draft_tokens=4)
    answer(governor, GPU_SMALL_DRAFTER, lambda _: 1.0, 100, 0, 0.0)
    assert governor.choose(100, {}) == PLAIN
    assert governor.choose(100, {"model": MODEL_OUTLOOK}) == Choice("model", 4)
    # One token of the two that remain is the target's own.
    assert governor.choose(2, {"model": MODEL_OUTLOOK}).num_draft_tokens == 1
    assert governor.choose(1, {"model": MODEL_OUTLOOK}) == PLAIN


def test_a_machine_slower_as_a_whole_changes_nothing():
    slower = Machine(10 * CPU_MODEL.step, 10 * CPU_MODEL.slope, {"model": 10 * CPU_MODEL.draft["model"]})
    traces = [answer(calibrated(m, 3, 0.2), m, lambda _: 0.85, 150, 3, 0.2)[1] for m in (CPU_MODEL, slower, CPU_MODEL)]
    assert traces[0] == traces[1] == traces[2]


def test_explains_itself():
    governor = calibrated(CPU_LOOKUP, 0, 0.0)
    _, choices = answer(governor, CPU_LOOKUP, lambda _: 0.9, 100, 0, 0.0)
    report = governor.explain()
    assert report["num_draft_tokens"] == [c.num_draft_tokens for c in choices]
    assert report["drafters"] == [c.drafter for c in choices]
    assert report["verify_steps"][2] == pytest.approx(CPU_LOOKUP.verify(2) / CPU_LOOKUP.step, rel=0.4)
    assert report["gained_steps"] > 0
    governor.next_answer()
    assert governor.explain()["num_draft_tokens"] == []
