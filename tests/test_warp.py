"""The filters against transformers' own, and on distributions small enough to check by eye."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rapid.errors import InvalidLogits
from rapid.sampling.warp import TokenWarp

PROBS = torch.tensor([[0.5, 0.3, 0.15, 0.05]])


def filtered(**settings: float) -> list[float]:
    """What is left of `PROBS`, renormalised, to four digits."""
    warp = TokenWarp(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    return [round(p, 4) for p in warp.scores(PROBS.log()).softmax(-1)[0].tolist()]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 4}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 99}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.6}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.9}, [0.5263, 0.3158, 0.1579, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.2}, [0.5263, 0.3158, 0.1579, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        # Top-p is measured on what top-k left: 0.5 / 0.8 = 0.625 is enough for 0.6.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        # Temperature comes first: at 0.5 the first token alone holds 0.68.
        ({"temperature": 0.5, "top_p": 0.6}, [1, 0, 0, 0]),
    ],
)
def test_four_tokens(settings, expected):
    assert filtered(**settings) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_equals_transformers(temperature, top_k, top_p, min_p):
    logits = torch.randn(32, 50, generator=torch.Generator().manual_seed(0)) * 4
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    if min_p:
        theirs = MinPLogitsWarper(min_p)(None, theirs)

    ours = TokenWarp(temperature, top_k, top_p, min_p).scores(logits)
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_tiny_temperature_is_the_argmax(temperature, scale):
    logits = torch.tensor([[-1.0, 2.0, 1.0, -torch.inf], [0.0, -3.0, -1.0, -2.0]]) * scale
    probs = TokenWarp(temperature, top_k=3, top_p=0.9, min_p=0.1).scores(logits).softmax(-1)
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_a_high_temperature_is_nearly_uniform():
    probs = TokenWarp(100.0).scores(torch.tensor([[1.0, 0.0, -1.0]])).softmax(-1)
    assert probs[0].tolist() == pytest.approx([1 / 3] * 3, abs=5e-3)


def test_ties_at_the_kth_place_stay():
    probs = TokenWarp(1.0, top_k=2).scores(torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()).softmax(-1)
    assert probs[0].tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])


def test_greedy_keeps_the_logits():
    logits = torch.tensor([[3.0, -torch.inf, 1.0]])
    warp = TokenWarp(0.0, top_k=1)
    assert warp.greedy
    assert torch.equal(warp.scores(logits), logits)


def test_the_logits_are_not_changed():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    TokenWarp(0.7, 3, 0.8, 0.1).scores(logits)
    assert torch.equal(logits, before)


def test_tokens_the_model_excludes_stay_excluded():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    for warp in (TokenWarp(1.0), TokenWarp(1.0, top_k=3), TokenWarp(1.0, top_p=0.999), TokenWarp(1.0, min_p=1e-9)):
        assert warp.scores(logits).softmax(-1)[0, [1, 3]].tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad_row",
    [[0.0, torch.nan, 1.0], [torch.nan] * 3, [-torch.inf] * 3, [0.0, torch.inf, 1.0], [-torch.inf, torch.nan, 0.0]],
)
def test_unusable_logits_are_an_error(temperature, bad_row):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad_row])
    with pytest.raises(InvalidLogits, match="NaN"):
        TokenWarp(temperature).scores(logits)
