"""Intervals and tests against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.evals.stats import bootstrap_mean, changes, noise_floor, paired_bootstrap, sign_test


def test_bootstrap_of_equal_scores_is_a_point():
    interval = bootstrap_mean([0.4] * 7)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.4, 0.4, 0.4))


def test_bootstrap_matches_the_normal_interval_of_many_scores():
    scores = np.random.default_rng(1).random(2000)
    interval = bootstrap_mean(scores, num_resamples=4000)
    half = 1.96 * scores.std() / math.sqrt(len(scores))
    assert interval.value == pytest.approx(scores.mean())
    assert interval.low == pytest.approx(scores.mean() - half, abs=half / 10)
    assert interval.high == pytest.approx(scores.mean() + half, abs=half / 10)


def test_bootstrap_is_reproducible_and_leaves_the_global_generator_alone():
    before = np.random.get_state()[1].tolist()
    assert bootstrap_mean([0.0, 1.0, 1.0], seed=3) == bootstrap_mean([0.0, 1.0, 1.0], seed=3)
    assert np.random.get_state()[1].tolist() == before


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(0)
    difficulty = rng.random(200)
    method = np.clip(difficulty + 0.02 + 0.01 * rng.standard_normal(200), 0, 1)
    paired = paired_bootstrap(method, difficulty)
    assert paired.low > 0
    alone = bootstrap_mean(method)
    assert alone.low < difficulty.mean() < alone.high


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=30))
def test_sign_test_is_the_exact_binomial_test(pairs):
    stats = pytest.importorskip("scipy.stats")
    method, base = zip(*pairs, strict=True)
    test = sign_test(method, base)
    assert test.wins + test.losses + test.ties == len(pairs)
    if test.wins + test.losses:
        expected = stats.binomtest(test.wins, test.wins + test.losses).pvalue
        assert test.p_value == pytest.approx(expected)
    else:
        assert test.p_value == 1.0


def test_sign_test_of_many_items_does_not_overflow():
    assert 0.0 <= sign_test([1.0] * 3000, [0.0] * 3000).p_value < 1e-300
    assert sign_test([1.0] * 5, [0.0] * 5).p_value == pytest.approx(2 / 32)


def test_rescued_and_broken():
    result = changes([1, 1, 0, 0, 0.5], [0, 1, 1, 0, 0.4])
    assert (result.rescued, result.broken, result.n) == (2, 1, 5)


def test_noise_floor():
    assert noise_floor([1, 0, 1], [1, 0, 1]) == 0.0
    noisy = [1, 0] * 50
    assert noise_floor(noisy, noisy[1:] + noisy[:1]) > 0.1


def test_unpaired_scores_are_refused():
    for function in (paired_bootstrap, sign_test, changes, noise_floor):
        with pytest.raises(ValueError, match="same items"):
            function([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_mean([])
