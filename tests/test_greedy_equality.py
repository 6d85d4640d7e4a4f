"""Greedy `exact` output is plain greedy output, token by token (B01), whatever drafts and whatever the widths (B05)."""

import pytest
import torch

from rapid.decode.control import FixedDraft
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.model import ModelDrafter
from rapid.models.hf import HFModel
from rapid.models.toy import tiny
from rapid.params import LAWS
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp
from rapid.types import Round

RED_BLUE = [11, 3, 27, 40, 3] * 40  # "red blue " forty times
OTHER = torch.randint(64, (90,), generator=torch.Generator().manual_seed(5)).tolist()
NEW = 64


def answer(
    target: HFModel,
    prompt: list[int],
    draft: HFModel | None = None,
    draft_prompt: list[int] | None = None,
    *,
    gamma: int = 4,
    rule: AcceptanceRule | None = None,
    warp: TokenWarp | None = None,
    max_new: int = NEW,
) -> list[Round]:
    sequence = target.new_sequence()
    sequence.prefill(prompt[:-1])
    drafters = {}
    if draft:
        drafters["model"] = ModelDrafter(draft.new_sequence(), draft_prompt or prompt, draft.eos_token_ids)
        drafters["model"].start()
    settings = DecodeSettings(warp or TokenWarp(), rule or AcceptanceRule(), FixedDraft("model", gamma))
    stop = StopRule(max_new, target.eos_token_ids)
    return list(decode(sequence, prompt, drafters, settings, stop, torch.Generator().manual_seed(0)))


def ids(rounds: list[Round]) -> list[int]:
    return [token for r in rounds for token in r.token_ids]


def generated(model: HFModel, prompt: list[int], max_new: int = NEW) -> list[int]:
    """transformers' own greedy decoding of the same weights, with its own attention and cache."""
    model.model.set_attn_implementation("eager")
    inputs = torch.tensor([prompt])
    output = model.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=max_new,
        eos_token_id=sorted(model.eos_token_ids) or None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return {name: generated(tiny(0), prompt) for name, prompt in (("red blue", RED_BLUE), ("other", OTHER))}


def test_plain_decoding_equals_transformers(plain):
    assert ids(answer(tiny(0), RED_BLUE)) == plain["red blue"]
    assert ids(answer(tiny(0), OTHER)) == plain["other"]
    assert len(set(plain["other"])) > 10  # not one token over and over


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("prompt", ["red blue", "other"])
class TestEveryGamma:
    def test_the_same_model_on_the_same_prompt(self, plain, prompt, gamma):
        text = RED_BLUE if prompt == "red blue" else OTHER
        model = tiny(0)
        rounds = answer(model, text, model, gamma=gamma)
        assert ids(rounds) == plain[prompt]
        assert sum(r.num_accepted for r in rounds) == sum(r.num_drafted for r in rounds) > 0

    def test_another_model(self, plain, prompt, gamma):
        text = RED_BLUE if prompt == "red blue" else OTHER
        rounds = answer(tiny(0), text, tiny(1), gamma=gamma)
        assert ids(rounds) == plain[prompt]
        assert sum(r.num_accepted for r in rounds) < sum(r.num_drafted for r in rounds)

    def test_the_same_model_on_another_prompt(self, plain, prompt, gamma):
        text, retrieved = (RED_BLUE, RED_BLUE[-30:]) if prompt == "red blue" else (OTHER, OTHER[20:50])
        rounds = answer(tiny(0), text, tiny(0), retrieved, gamma=gamma)
        assert ids(rounds) == plain[prompt]
        assert sum(r.num_accepted for r in rounds) < sum(r.num_drafted for r in rounds)


@pytest.mark.parametrize("law", ["transfer", "paper"])
def test_eta_zero_is_lossless_under_every_law(plain, law):
    assert ids(answer(tiny(0), OTHER, tiny(1), rule=AcceptanceRule(law, 0.0))) == plain["other"]


def test_a_transfer_changes_the_answer(plain):
    """Negative control: with eta 10 and another drafter the answer is no longer the target's."""
    rounds = answer(tiny(0), OTHER, tiny(1), rule=AcceptanceRule("transfer", 10.0))
    assert ids(rounds) != plain["other"]


def test_end_tokens_stop_where_transformers_stops(plain):
    ends = {plain["other"][20], plain["other"][31]}
    target, draft = tiny(0, eos_token_ids=ends), tiny(1, eos_token_ids=ends)
    expected = generated(tiny(0, eos_token_ids=ends), OTHER)
    assert len(expected) < NEW
    rounds = answer(target, OTHER, draft)
    assert ids(rounds) == expected
    assert rounds[-1].finish_reason == "stop"


# --- one tokenizer, heads of different widths (B05) ------------------------------------------------------------

TOKENS = 30


def padded(seed: int, rows: int) -> HFModel:
    """A model of 30 tokens with `rows` output rows; the last padding row has the highest logit at every step."""
    model = tiny(seed, vocab_size=TOKENS, head_rows=rows)
    head = model.model.lm_head
    head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, torch.tensor(rows - 1), 1e4))
    return model


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(40, 32), (32, 40)])
@pytest.mark.parametrize("draft_seed", [0, 1])
def test_padding_rows_are_never_proposed_or_emitted(target_rows, draft_rows, draft_seed):
    prompt = [t % TOKENS for t in OTHER]
    target, draft = padded(0, target_rows), padded(draft_seed, draft_rows)
    assert int(target.model(torch.tensor([prompt])).logits[0, -1].argmax()) == target_rows - 1
    plain = ids(answer(target, prompt, max_new=30))
    assert max(plain) < TOKENS
    for gamma in (1, 7):
        assert ids(answer(target, prompt, draft, gamma=gamma, max_new=30)) == plain
    for law in LAWS:
        rounds = answer(target, prompt, draft, rule=AcceptanceRule(law, 5.0), warp=TokenWarp(1.0), max_new=30)
        assert max(ids(rounds)) < TOKENS
    proposals = ModelDrafter(draft.new_sequence(), prompt, ())
    proposals.start()
    proposal = proposals.propose(20, TokenWarp(2.0), torch.Generator().manual_seed(0), need_probs=True)
    assert max(proposal.token_ids) < TOKENS
    assert proposal.probs is not None
    assert proposal.probs.shape == (20, TOKENS)
