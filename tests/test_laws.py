"""The three laws: against their closed forms, by sampling, and on hand-made logits.

Sampled tests compare a histogram of n independent draws over K cells with a closed form in total variation, and
allow the distance that Bretagnolle-Huber-Carol give: P(TV > eps) <= 2^K exp(-2 n eps^2). `FALSE_FAILURE` is the
chance of each of some thirty such comparisons to fail on correct code, over the choice of seeds (they are fixed).
The same statistic applied to deliberately wrong residuals must exceed the bound.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from rapid.decode.control import FixedDraft
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.model import ModelDrafter
from rapid.errors import InvalidParameter
from rapid.models.toy import Markov
from rapid.params import LAWS, Speculation
from rapid.sampling.transfer import adjusted_scores
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp
from rapid.types import Proposal

FALSE_FAILURE = 1e-6


def tv_bound(cells: int, draws: int) -> float:
    return math.sqrt((cells * math.log(2) - math.log(FALSE_FAILURE)) / (2 * draws))


def total_variation(counts: np.ndarray, law: np.ndarray) -> float:
    return float(np.abs(counts / counts.sum() - law).sum() / 2)


# --- closed forms, written down from spec alone in numpy -------------------------------------------------------


def adjusted(p: np.ndarray, q: np.ndarray, eta: float, alpha: float) -> np.ndarray:
    shift = np.where(q >= alpha * q.max(), eta * (q - p), 0.0)
    weights = p * np.exp(shift)
    return weights / weights.sum()


def closed_form(law: str, p: np.ndarray, q: np.ndarray, eta: float, alpha: float) -> np.ndarray:
    """The distribution of a token at a drafted position."""
    if law == "exact":
        return p
    p_hat = adjusted(p, q, eta, alpha)
    if law == "transfer":
        return p_hat
    kept = np.minimum(q, p_hat)
    rest = np.maximum(p - kept, 0)
    return kept + (1 - kept.sum()) * rest / rest.sum() if rest.sum() > 0 else kept / kept.sum()


def analytic_output(rule: AcceptanceRule, p: torch.Tensor, q: torch.Tensor) -> np.ndarray:
    """The same, computed from the code's own acceptance and residual: sum over kept and rejected drafts."""
    accept = adjusted_scores(p.log(), p, q, rule.eta, rule.alpha).softmax(-1) if rule.transfers else p
    kept = torch.where(q > 0, q * (accept / q.clamp_min(1e-300)).clamp_max(1), 0)
    residual = rule.residual(p, q, accept)
    return (kept + (1 - kept.sum()) * residual / residual.sum()).numpy()


def random_probs(rng: np.random.Generator, size: int) -> np.ndarray:
    """Dirichlet of any peakedness, sometimes with filtered tokens (zeros)."""
    probs = rng.dirichlet(np.full(size, rng.choice([0.1, 1.0, 10.0]))) + 1e-12
    if rng.random() < 0.4:
        probs[rng.permutation(size)[: rng.integers(1, size)]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("law", LAWS)
def test_analytic_output_is_the_closed_form(law):
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size = int(rng.integers(2, 12))
        p, q = random_probs(rng, size), random_probs(rng, size)
        eta = float(rng.choice([0, 0.5, 1, 5, 10, 50])) * rng.random()
        rule = AcceptanceRule(law, eta, alpha=float(rng.choice([0, 0.1, 0.5, 1])))
        output = analytic_output(rule, torch.from_numpy(p), torch.from_numpy(q))
        np.testing.assert_allclose(output, closed_form(law, p, q, eta, rule.alpha), atol=1e-9, rtol=0)


def test_the_closed_forms_differ_from_each_other():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    outputs = [closed_form(law, p, q, 5.0, 0.0) for law in LAWS]
    assert all(np.abs(a - b).max() > 0.01 for a, b in itertools.combinations(outputs, 2))


def test_worked_example():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.2, 0.7, 0.1]))
    p_hat = adjusted_scores(p.log(), p, q, 1.0, alpha=0.0).softmax(-1)
    assert p_hat.numpy().round(3).tolist() == [0.371, 0.448, 0.181]
    output = {law: analytic_output(AcceptanceRule(law, 1.0, 0.0), p, q).round(3).tolist() for law in LAWS}
    assert output["paper"] == [0.389, 0.448, 0.163]
    assert output["transfer"] == [0.371, 0.448, 0.181]
    assert output["exact"] == [0.5, 0.3, 0.2]


def test_the_mask_leaves_what_the_drafter_finds_improbable():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([[0.2, 0.3, 0.5]], [[0.9, 0.095, 0.005]]))
    shifted = adjusted_scores(p.log(), p, q, 10.0, alpha=0.1) - p.log()
    np.testing.assert_allclose(shifted.numpy(), [[7.0, -2.05, 0.0]])


EDGES = {
    "disjoint supports": ([0.5, 0.5, 0, 0], [0, 0, 0.25, 0.75]),
    "p = q": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
    "one-hot q": ([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 0]),
    "one-hot q outside p": ([0.5, 0.5, 0, 0], [0, 0, 1, 0]),
    "one-hot p": ([0, 1, 0, 0], [0.1, 0.2, 0.3, 0.4]),
    "one-hot both": ([0, 1, 0, 0], [0, 1, 0, 0]),
    "zeros in p": ([0.7, 0.3, 0, 0], [0.1, 0.2, 0.3, 0.4]),
    "zeros in q": ([0.1, 0.2, 0.3, 0.4], [0.7, 0.3, 0, 0]),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize("eta", [0.0, 10.0])
def test_edges(law, case, eta):
    p, q = (np.array(x) for x in EDGES[case])
    output = analytic_output(AcceptanceRule(law, eta), torch.from_numpy(p), torch.from_numpy(q))
    np.testing.assert_allclose(output, closed_form(law, p, q, eta, 0.1), atol=1e-9)
    assert output.sum() == pytest.approx(1)
    assert (output[p + q == 0] == 0).all()


def test_a_zero_sum_residual_falls_back_to_what_is_accepted_against():
    p = torch.tensor([0.1, 0.2, 0.7])
    accept = torch.tensor([0.3, 0.3, 0.4])
    assert torch.equal(AcceptanceRule("exact").residual(p, p, p), p)
    assert torch.equal(AcceptanceRule("transfer", 1.0).residual(p, accept, accept), accept)
    assert torch.equal(AcceptanceRule("paper", 1.0).residual(p, p, p), p)


@pytest.mark.parametrize("law", LAWS)
def test_rounding_alone_cannot_break_a_round(law):
    """p and q equal up to float32 rounding: a rejection is then all rounding, and still yields a token of p."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        scores = torch.randn(2, 50, generator=generator) * 5
        q = (scores[:1] + 1e-7).softmax(-1) * (1 + 1e-6)
        token = int(q[0].argmax())
        verdict = AcceptanceRule(law, 10.0).verify(scores, Proposal([token], q), generator, greedy=False)
        assert 0 <= verdict.next_token < 50


@pytest.mark.parametrize("law", LAWS)
def test_ratio_zero_is_never_accepted(law, monkeypatch):
    """Even the smallest uniform, 0, does not keep a token the target excludes (`<=` would)."""
    monkeypatch.setattr(torch, "rand", lambda n, **kwargs: torch.zeros(n, dtype=torch.float64))
    scores = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    proposal = Proposal([2], torch.tensor([[0.1, 0.1, 0.8]]))
    verdict = AcceptanceRule(law, 10.0).verify(scores, proposal, torch.Generator().manual_seed(0), greedy=False)
    assert (verdict.num_accepted, verdict.kind) == (0, "residual")
    assert verdict.next_token in (0, 1)


def test_rows_must_match_the_proposal():
    with pytest.raises(ValueError, match="2 draft tokens need 3 rows"):
        AcceptanceRule().verify(torch.zeros(2, 4), Proposal([0, 1]), torch.Generator(), greedy=True)


# --- by sampling: one position through `verify` ----------------------------------------------------------------

P, Q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.6, 0.05, 0.25])


def sampled_counts(rule: AcceptanceRule, p: torch.Tensor, q: torch.Tensor, draws: int, *, certain=False) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator).tolist()
    scores = p.log().repeat(2, 1)
    counts = np.zeros(len(p))
    for token in drafts:
        proposal = Proposal([token], None if certain else q[None])
        verdict = rule.verify(scores, proposal, generator, greedy=False)
        counts[token if verdict.num_accepted else verdict.next_token] += 1
    return counts


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("eta", [0.0, 3.0])
def test_sampled_position_follows_the_law(law, eta):
    counts = sampled_counts(AcceptanceRule(law, eta), P, Q, 6000)
    assert total_variation(counts, closed_form(law, P.numpy(), Q.numpy(), eta, 0.1)) < tv_bound(4, 6000)


def test_certain_drafts_are_lossless():
    """One-hot q (an n-gram drafter): whatever is drafted, the output follows p."""
    counts = sampled_counts(AcceptanceRule("exact"), P, torch.tensor([0.0, 1.0, 0.0, 0.0]), 6000, certain=True)
    assert total_variation(counts, P.numpy()) < tv_bound(4, 6000)


WRONG_RESIDUALS = {
    "p": ("exact", lambda p, q, a: p),
    "p - q not cut at 0": ("exact", lambda p, q, a: (p - q).abs()),
    "q - p": ("exact", lambda p, q, a: (q - p).clamp_min(0)),
    "(p - q)+ under transfer": ("transfer", lambda p, q, a: (p - q).clamp_min(0)),
    "(p_hat - q)+ under paper": ("paper", lambda p, q, a: (a - q).clamp_min(0)),
}


@pytest.mark.parametrize("wrong", WRONG_RESIDUALS)
def test_a_wrong_residual_is_noticed(wrong):
    """Negative control: the statistic of the test above, on a broken rule, lies beyond the bound."""
    law, residual = WRONG_RESIDUALS[wrong]
    broken = type("Broken", (AcceptanceRule,), {"residual": lambda self, p, q, a: residual(p, q, a)})
    counts = sampled_counts(broken(law, 5.0, 0.0), P, Q, 6000)
    assert total_variation(counts, closed_form(law, P.numpy(), Q.numpy(), 5.0, 0.0)) > tv_bound(4, 6000)


@pytest.mark.parametrize("law", LAWS)
def test_the_bonus_token_follows_p(law):
    rule, generator, counts, draws = AcceptanceRule(law, 10.0), torch.Generator().manual_seed(0), np.zeros(4), 4000
    scores = torch.stack([torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf]), P.log()])
    proposal = Proposal([0], torch.tensor([[0.9, 0.1, 0.0, 0.0]]))
    for _ in range(draws):
        verdict = rule.verify(scores, proposal, generator, greedy=False)
        assert (verdict.num_accepted, verdict.kind) == (1, "bonus")
        counts[verdict.next_token] += 1
    assert total_variation(counts, P.numpy()) < tv_bound(4, draws)


# --- by sampling: the first two tokens of an answer through `decode` -------------------------------------------

TARGET_TABLE = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
DRAFT_TABLE = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.1, 0.4], [0.6, 0.3, 0.1]])
START, DRAWS = 0, 2000


def filtered(probs: np.ndarray, warp: TokenWarp) -> np.ndarray:
    """Temperature, top-k and top-p of one distribution by the book."""
    probs = probs ** (1 / warp.temperature)
    order = np.argsort(-probs)
    if warp.top_k:
        probs[order[warp.top_k :]] = 0
    probs /= probs.sum()
    mass_before = np.cumsum(probs[order]) - probs[order]
    probs[order[mass_before >= warp.top_p]] = 0
    return probs / probs.sum()


def pair_law(law: str, eta: float, warp: TokenWarp) -> np.ndarray:
    """P(first, second) [3, 3] where both positions are drafted."""

    def position(previous: int) -> np.ndarray:
        p, q = (filtered(t[previous].double().numpy(), warp) for t in (TARGET_TABLE, DRAFT_TABLE))
        return closed_form(law, p, q, eta, 0.1)

    return np.stack([position(START)[first] * position(first) for first in range(3)])


def sampled_pairs(
    rule: AcceptanceRule, warp: TokenWarp, draws: int, *, drafter_class: type[ModelDrafter] = ModelDrafter, **options
) -> tuple[np.ndarray, Counter]:
    """Counts of (first, second) [3, 3], and how many drafts the first round kept.

    Three tokens are asked for, so that the second is a drafted one also after a rejection of the first.
    """
    target, draft = Markov(TARGET_TABLE), Markov(DRAFT_TABLE)
    generator = torch.Generator().manual_seed(0)
    counts, kept = np.zeros((3, 3)), Counter()
    for _ in range(draws):
        drafter = drafter_class(draft.new_sequence(), [START], (), **options)
        drafter.start()
        settings = DecodeSettings(warp, rule, FixedDraft("model", 4))
        rounds = decode(target.new_sequence(), [START], {"model": drafter}, settings, StopRule(3), generator)
        emitted = []
        for done in rounds:
            if not emitted:
                kept[done.num_accepted] += 1
            emitted += done.token_ids
            if len(emitted) >= 2:
                break
        counts[emitted[0], emitted[1]] += 1
    return counts, kept


WARPS = {
    "plain": TokenWarp(1.0),
    "temperature": TokenWarp(0.6),
    "top-k": TokenWarp(1.0, top_k=2),
    "top-p": TokenWarp(1.3, top_p=0.8),
}


@pytest.mark.parametrize(
    ("law", "warp"),
    [
        *itertools.product(LAWS, ["plain"]),
        ("exact", "temperature"),
        ("transfer", "top-k"),
        ("paper", "top-p"),
        ("exact", "top-p"),
    ],
)
def test_first_and_second_token_follow_the_law(law, warp):
    rule = AcceptanceRule(law, 3.0)
    counts, kept = sampled_pairs(rule, WARPS[warp], DRAWS)
    expected = pair_law(law, 3.0, WARPS[warp])
    assert total_variation(counts.sum(1), expected.sum(1)) < tv_bound(3, DRAWS)
    assert total_variation(counts.ravel(), expected.ravel()) < tv_bound(9, DRAWS)
    # Both ways to a second token were taken often: inside the first round's draft, and in a round of its own.
    assert kept[0] > DRAWS / 20
    assert kept[2] > DRAWS / 20


def test_a_wrong_residual_is_noticed_in_pairs():
    class Broken(AcceptanceRule):
        def residual(self, target_probs, draft_probs, accept_probs):
            return target_probs

    counts, _ = sampled_pairs(Broken("exact"), WARPS["plain"], DRAWS)
    expected = pair_law("exact", 0.0, WARPS["plain"])
    assert total_variation(counts.sum(1), expected.sum(1)) > tv_bound(3, DRAWS)
    assert total_variation(counts.ravel(), expected.ravel()) > tv_bound(9, DRAWS)


class DropsTheUnsureToken(ModelDrafter):
    """Ends a draft before the unsure token instead of after it: what must not be done."""

    def propose(self, *args, **kwargs):
        made = super().propose(*args, **kwargs)
        unsure = float(made.probs[-1, made.token_ids[-1]]) < self._min_draft_prob
        return Proposal(made.token_ids[:-1], made.probs[:-1]) if unsure else made


@pytest.mark.parametrize(("drafter_class", "exact"), [(ModelDrafter, True), (DropsTheUnsureToken, False)])
def test_a_draft_may_end_after_an_unsure_token_but_not_before(drafter_class, exact):
    threshold = float(DRAFT_TABLE.max(-1).values.min())  # every token but the likeliest is unsure somewhere
    counts, _ = sampled_pairs(
        AcceptanceRule("exact"), WARPS["plain"], DRAWS, drafter_class=drafter_class, min_draft_prob=threshold
    )
    expected = pair_law("exact", 0.0, WARPS["plain"])
    assert (total_variation(counts.ravel(), expected.ravel()) < tv_bound(9, DRAWS)) == exact


def test_early_ends_are_refused_where_they_change_the_answer():
    assert Speculation(method="sd", min_draft_prob=0.3).lossless
    for law in ("paper", "transfer"):
        with pytest.raises(InvalidParameter, match="min_draft_prob"):
            Speculation(law=law, min_draft_prob=0.3)


def test_eta_zero_makes_the_three_laws_one():
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(5, 6, generator=generator) * 2
        q = (torch.randn(4, 6, generator=generator) * 2).softmax(-1)
        proposal = Proposal(torch.multinomial(q, 1, generator=generator).flatten().tolist(), q)
        for greedy in (False, True):
            verdicts = {
                AcceptanceRule(law, 0.0).verify(scores, proposal, generator.manual_seed(seed), greedy=greedy)
                for law in LAWS
            }
            assert len(verdicts) == 1


# --- greedy ----------------------------------------------------------------------------------------------------

# argmax z is 0 by a little; a drafter sure of 1 lifts token 1 above it when eta is 2 (shift of about +1, -0.8).
Z = [2.0, 1.9, 0.0]
SURE_OF_1 = [0.05, 0.9, 0.05]


@pytest.mark.parametrize(
    ("law", "eta", "draft", "q", "accepted", "emitted"),
    [
        ("exact", 0.0, 0, SURE_OF_1, True, None),
        ("exact", 2.0, 1, SURE_OF_1, False, 0),  # exact: no transfer, whatever eta
        ("transfer", 0.0, 1, SURE_OF_1, False, 0),
        ("transfer", 2.0, 1, SURE_OF_1, True, None),
        ("paper", 2.0, 1, SURE_OF_1, True, None),
        ("transfer", 2.0, 2, SURE_OF_1, False, 1),  # rejected: the adjusted argmax
        ("paper", 2.0, 2, SURE_OF_1, False, 0),  # rejected: the target's own argmax
        ("transfer", 2.0, 0, SURE_OF_1, False, 1),  # the target's argmax, no longer the adjusted one
        ("paper", 2.0, 0, SURE_OF_1, False, 0),
        ("transfer", 2.0, 1, None, True, None),  # a certain draft is q = one-hot
        ("transfer", 0.05, 1, SURE_OF_1, False, 0),  # too small a shift
    ],
)
def test_greedy_laws(law, eta, draft, q, accepted, emitted):
    scores = torch.tensor([Z, [0.0, 0.0, 1.0]])
    proposal = Proposal([draft], None if q is None else torch.tensor([q]))
    verdict = AcceptanceRule(law, eta).verify(scores, proposal, torch.Generator(), greedy=True)
    if accepted:
        assert (verdict.num_accepted, verdict.next_token, verdict.kind) == (1, 2, "bonus")
    else:
        assert (verdict.num_accepted, verdict.next_token, verdict.kind) == (0, emitted, "residual")


def test_greedy_stops_at_the_first_rejection():
    scores = torch.eye(3)[[0, 1, 2, 0]]
    verdict = AcceptanceRule().verify(scores, Proposal([0, 2, 2]), torch.Generator(), greedy=True)
    assert (verdict.num_accepted, verdict.next_token, verdict.kind) == (1, 1, "residual")


@pytest.mark.parametrize("law", LAWS)
def test_greedy_is_the_limit_of_temperature_zero(law):
    """With p and q of the shift at temperature 1, sampling from z / T with T towards 0 takes the same decisions."""
    generator = torch.Generator().manual_seed(3)
    rule = AcceptanceRule(law, 4.0)
    for _ in range(300):
        z, q = torch.randn(1, 5, generator=generator) * 2, (torch.randn(1, 5, generator=generator) * 2).softmax(-1)
        token = int(torch.randint(5, (1,), generator=generator))
        shifted = adjusted_scores(z, z.softmax(-1), q, 4.0, 0.1) if rule.transfers else z
        p, accept = (one_hot(x[0].argmax(), 5) for x in (z, shifted))
        certain = one_hot(torch.tensor(token), 5)
        expected = token if accept[token] == 1 else int(rule.residual(p, certain, accept).argmax())

        verdict = rule.verify(z.repeat(2, 1), Proposal([token], q), generator, greedy=True)
        assert (token if verdict.num_accepted else verdict.next_token) == expected


def one_hot(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(index, size).float()
