"""Intervals and tests for paired scores.

All functions take scores of the same items in the same order. Resampling draws from its own seeded generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
_BLOCK = 500  # resamples held in memory at once


@dataclass(frozen=True)
class Interval:
    """An estimate with its percentile bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SignTest:
    """Items where the first of a pair scored higher (`wins`), lower (`losses`) or the same (`ties`), and the
    two-sided exact probability of so uneven a split under even odds, ties left out."""

    wins: int
    losses: int
    ties: int
    p_value: float


@dataclass(frozen=True)
class Changes:
    """Items that the baseline had wrong and the method right (`rescued`), and the reverse (`broken`), of `n`."""

    rescued: int
    broken: int
    n: int


def bootstrap_mean(scores: ArrayLike, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Interval:
    """The mean over items and its 95 % interval, items drawn with replacement. Needs at least one score."""
    values = _array(scores)
    rng = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, _BLOCK):
        count = min(_BLOCK, num_resamples - start)
        drawn = rng.integers(0, len(values), size=(count, len(values)))
        means[start : start + count] = values[drawn].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(values.mean()), float(low), float(high))


def paired_bootstrap(
    method: ArrayLike, baseline: ArrayLike, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Interval:
    """The mean gain of `method` over `baseline` and its 95 % interval, pairs drawn with replacement."""
    return bootstrap_mean(_differences(method, baseline), seed=seed, num_resamples=num_resamples)


def sign_test(method: ArrayLike, baseline: ArrayLike) -> SignTest:
    """The exact two-sided sign test: 2 P(X <= min(wins, losses)) for X binomial(wins + losses, 1/2)."""
    difference = _differences(method, baseline)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    trials = wins + losses
    tail = sum(math.comb(trials, k) for k in range(min(wins, losses) + 1))
    # Whole numbers until the division: 2 ** trials overflows a float beyond 1023 trials.
    p_value = min(1.0, 2 * tail / 2**trials)
    return SignTest(wins, losses, len(difference) - trials, p_value)


def changes(method: ArrayLike, baseline: ArrayLike, *, right_from: float = 0.5) -> Changes:
    """Rescued and broken items; a score counts as right from `right_from` on."""
    first, second = _pair(method, baseline)
    right, was_right = first >= right_from, second >= right_from
    return Changes(int((right & ~was_right).sum()), int((~right & was_right).sum()), len(right))


def noise_floor(sd: ArrayLike, lc: ArrayLike, *, seed: int = 0) -> float:
    """How far from zero the gain of lossless speculation over its own target plausibly lies.

    Both draw from the same distribution, so their difference is sampling and rounding noise alone: a gain that is
    no larger means nothing. The larger end of the 95 % interval of |sd - lc|, in units of the scores.
    """
    interval = paired_bootstrap(sd, lc, seed=seed)
    return max(abs(interval.low), abs(interval.high))


def _array(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"scores must be a list of at least one number, got shape {values.shape}")
    return values


def _differences(method: ArrayLike, baseline: ArrayLike) -> NDArray[np.float64]:
    first, second = _pair(method, baseline)
    return first - second


def _pair(method: ArrayLike, baseline: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = _array(method), _array(baseline)
    if first.shape != second.shape:
        raise ValueError(f"paired scores must be of the same items, got {len(first)} and {len(second)}")
    return first, second
