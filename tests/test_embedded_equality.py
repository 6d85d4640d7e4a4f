"""The embedded model in float32: speculation with the law `exact` gives its own greedy answer, token by token.

Three texts, four draft lengths, three drafters: the model itself on the retrieved passages (RAPID's drafter), the
model itself on the very same prompt (every draft is right), and a random one (hardly any is). The plain answer is
compared with transformers' own `generate`, with transformers' attention and cache.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import rapid
from rapid.decode.control import FixedDraft
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.model import ModelDrafter
from rapid.models.base import LanguageModel, TokenSequence
from rapid.models.hf import HFModel
from rapid.retrieval.index import Index
from rapid.retrieval.select import join_chunks
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp
from rapid.types import Round

pytestmark = pytest.mark.embedded

ROOT = Path(__file__).resolve().parent.parent
EXCERPTS = ROOT / "tests" / "data" / "excerpts"
QUESTIONS = {
    "sea_king_gift": "Describe the rock and the people who live there.",
    "group_meeting": "Write a summary of the meeting.",
    "renewable_fuel": "Explain how the Renewable Fuel Standard works.",
}
NEW = 48
# Every combination; what is marked slow repeats on other texts what one text shows already.
COMBINATIONS = [
    pytest.param(text, drafter, gamma, marks=[pytest.mark.slow] if text != "sea_king_gift" and gamma != 4 else [])
    for text in QUESTIONS
    for drafter in ("passages", "same", "random")
    for gamma in (1, 2, 4, 10)
]


@dataclass
class Case:
    """One text with its question: the target has read it once, and is rewound for every answer."""

    prompt: list[int]
    draft_prompt: list[int]
    target: TokenSequence
    drafting: dict[str, TokenSequence]
    plain: list[int]


@pytest.fixture(scope="module")
def model(embedded_engine: rapid.Engine) -> HFModel:
    return embedded_engine.backend.target_model


@pytest.fixture(scope="module")
def stranger(model: HFModel) -> HFModel:
    """A random Llama over the embedded model's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8192,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = LlamaForCausalLM(config).eval()
    return HFModel(llama, name="random", vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)


@pytest.fixture(scope="module")
def case(request, embedded_engine: rapid.Engine, model: HFModel, stranger: HFModel) -> Case:
    document = rapid.Document((EXCERPTS / f"{request.param}.txt").read_text(encoding="utf-8"))
    question, prompter = QUESTIONS[request.param], embedded_engine.target_prompter
    settings = rapid.Retrieval(ranking="bm25", chunk_tokens=128)
    found = Index.build([document], prompter.count, settings).search(question, 256)
    prompt = prompter.encode(document.text, question, retrieved=False)
    draft_prompt = prompter.encode(join_chunks(found.chunks), question, retrieved=True)
    assert 800 < len(prompt) < 1600
    assert len(draft_prompt) < len(prompt) / 2
    target = model.new_sequence()
    target.prefill(prompt[:-1])
    drafting = {"passages": model.new_sequence(), "same": model.new_sequence(), "random": stranger.new_sequence()}
    made = Case(prompt, draft_prompt, target, drafting, [])
    made.plain = [t for r in answer(made, model, None, 0) for t in r.token_ids]
    assert len(made.plain) > NEW // 2
    return made


def answer(case: Case, model: LanguageModel, drafter: str | None, gamma: int) -> list[Round]:
    """All rounds of one answer."""
    case.target.rewind(len(case.prompt) - 1)
    drafters = {}
    if drafter:
        prompt = case.draft_prompt if drafter == "passages" else case.prompt
        drafters["model"] = ModelDrafter(case.drafting[drafter], prompt, model.eos_token_ids)
        drafters["model"].start()
    settings = DecodeSettings(TokenWarp(), AcceptanceRule("exact"), FixedDraft("model", gamma))
    stop = StopRule(NEW, model.eos_token_ids)
    return list(decode(case.target, case.prompt, drafters, settings, stop, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("case", list(QUESTIONS), indirect=True)
def test_plain_decoding_is_transformers_own(case, model):
    inputs = torch.tensor([case.prompt])
    ours = model.model.config._attn_implementation
    model.model.set_attn_implementation("sdpa")
    try:
        output = model.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=sorted(model.eos_token_ids),
            pad_token_id=0,
        )
    finally:
        model.model.set_attn_implementation(ours)
    assert output[0, len(case.prompt) :].tolist() == case.plain


@pytest.mark.parametrize(("case", "drafter", "gamma"), COMBINATIONS, indirect=["case"])
def test_speculation_changes_no_token(case, model, drafter, gamma):
    rounds = answer(case, model, drafter, gamma)
    drafted, accepted = sum(r.num_drafted for r in rounds), sum(r.num_accepted for r in rounds)
    assert [t for r in rounds for t in r.token_ids] == case.plain
    assert drafted > 0
    if drafter == "same":
        assert accepted == drafted
    elif drafter == "random":
        assert accepted / drafted < 0.05
    else:
        assert 0.1 < accepted / drafted < 1


@pytest.mark.slow
def test_the_documents_own_questions(embedded_engine):
    """The whole way, on the document of the demo."""
    lines = (ROOT / "examples" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    assert sum(q.get("demo", False) for q in questions) == 1
    session = embedded_engine.open(ROOT / "examples" / "skerrow_fell.md")
    assert session.warnings == []
    for item in questions:
        found = session.ask(item["question"], sampling=rapid.Sampling(max_new_tokens=64))
        assert all(word in found.text for word in item["keywords"]), (item["question"], found.text)
        assert found.retrieved
