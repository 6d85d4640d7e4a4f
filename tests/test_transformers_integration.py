"""RAPID as `custom_generate`: transformers' settings mean what they mean without it, and nothing is left changed."""

import copy
import itertools

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import rapid
from conftest import byte_tokenizer
from rapid.errors import InvalidParameter, RapidError

VOCAB = 48
PROMPT = torch.tensor([[11, 3, 27, 40, 3, 8, 9, 30, 30, 7, 41, 19]])
DRAFT_PROMPT = torch.tensor([[11, 3, 30, 7, 41, 19]])
decoding = rapid.integrations.transformers.decoding


def llama(seed: int, vocab_size: int = VOCAB, **options) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return llama(0)


@pytest.fixture(scope="module")
def other() -> LlamaForCausalLM:
    return llama(1)


def generate(model: LlamaForCausalLM, custom=None, **options) -> list[int]:
    """New tokens of one generate call: 24 greedy ones unless told otherwise."""
    options = {"do_sample": False, "max_new_tokens": 24, "attention_mask": torch.ones_like(PROMPT)} | options
    output = model.generate(PROMPT, custom_generate=custom, **options)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    assert torch.equal(sequences[:, : PROMPT.shape[1]], PROMPT)
    return sequences[0, PROMPT.shape[1] :].tolist()


class TestGreedyWithoutTransferIsPlainGenerate:
    @pytest.mark.parametrize("gamma", [0, 1, 2, 4, 10, 60])
    @pytest.mark.parametrize("draft", ["itself", "itself on other text", "another"])
    def test_tokens(self, target, other, gamma, draft):
        model = other if draft == "another" else target
        prompt = PROMPT if draft == "itself" else DRAFT_PROMPT
        for options in ({"eta": 0.0}, {"law": "exact"}):
            assert generate(target, decoding(model, prompt, num_draft_tokens=gamma, **options)) == generate(target)

    def test_a_transfer_differs(self, target, other):
        assert generate(target, decoding(other, DRAFT_PROMPT, eta=40)) != generate(target)

    @pytest.mark.parametrize("rows", [(VOCAB, VOCAB + 8), (VOCAB + 8, VOCAB)])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_heads_of_different_widths(self, rows, do_sample):
        """Over one tokenizer, padded to different widths: padding is never proposed to a head that lacks it."""
        wide, narrow = (llama(seed, vocab_size=size) for seed, size in enumerate(rows))
        for model in (wide, narrow):
            model.lm_head.weight.data[VOCAB:] = 0
        new = generate(wide, decoding(narrow, DRAFT_PROMPT, eta=0), do_sample=do_sample, top_k=3)
        assert len(new) == 24
        if not do_sample:
            assert new == generate(wide)


class TestSettingsOfGenerate:
    """Each changes the plain answer, and changes ours in the same way, whatever the size of a block."""

    OPTIONS = (
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [17]]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 7},
        {"max_length": 20, "max_new_tokens": None},
    )

    @pytest.mark.parametrize("gamma", [1, 4, 10])
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_options(self, target, options, gamma):
        expected = generate(target, **options)
        assert generate(target, decoding(target, PROMPT, eta=0, num_draft_tokens=gamma), **options) == expected
        assert generate(target, decoding(target, DRAFT_PROMPT, eta=0, num_draft_tokens=gamma), **options) == expected

    def test_they_are_no_options_without_effect(self, target):
        assert all(generate(target, **o) != generate(target) for o in self.OPTIONS[:2] + self.OPTIONS[3:])

    @pytest.mark.parametrize("gamma", [1, 4, 10])
    @pytest.mark.parametrize("position", [0, 2, 5])
    def test_any_of_several_end_tokens(self, target, gamma, position):
        plain = generate(target)
        ends = [plain[position], plain[position + 3]]
        expected = generate(target, eos_token_id=ends)
        assert expected[-1] in ends
        assert len(expected) < 24
        assert generate(target, decoding(target, PROMPT, eta=0, num_draft_tokens=gamma), eos_token_id=ends) == expected

    @pytest.mark.parametrize("gamma", [1, 4, 10])
    def test_no_end_before_the_minimum(self, target, gamma):
        plain = generate(target)
        options = {"eos_token_id": sorted(set(plain[:2])), "min_new_tokens": 6}
        expected = generate(target, **options)
        assert len(expected) >= 6
        assert generate(target, decoding(target, PROMPT, eta=0, num_draft_tokens=gamma), **options) == expected

    @pytest.mark.parametrize("gamma", [1, 4, 10])
    @pytest.mark.parametrize("at", [1, 3, 6])
    def test_a_stopping_criterion_in_the_middle_of_a_block(self, target, gamma, at):
        plain = generate(target)

        class Watch(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                ends = input_ids[:, -2:].tolist() == [plain[at - 1 : at + 1]]
                return torch.full((len(input_ids),), ends)

        custom = decoding(target, PROMPT, eta=0, num_draft_tokens=gamma)
        watch = {"stopping_criteria": StoppingCriteriaList([Watch()])}
        assert generate(target, custom, **watch) == generate(target, **watch) == plain[: at + 1]

    def test_stop_strings(self):
        tokenizer = byte_tokenizer()
        model = llama(0, vocab_size=len(tokenizer))
        plain = generate(model)
        stop = tokenizer.decode(plain[4:6])
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
        expected = generate(model, stop_strings=[stop], tokenizer=tokenizer)
        assert len(expected) < 24
        assert generate(model, decoding(model, PROMPT, eta=0), stopping_criteria=criteria) == expected

    def test_a_streamer_gets_every_token(self, target):
        class Streamer:
            def __init__(self):
                self.got: list[int] = []
                self.ended = 0

            def put(self, value):
                self.got += value.flatten().tolist()

            def end(self):
                self.ended += 1

        plain, ours = Streamer(), Streamer()
        generate(target, streamer=plain)
        new = generate(target, decoding(target, PROMPT, eta=0, streamer=ours))
        assert ours.got == plain.got == PROMPT[0].tolist() + new
        assert ours.ended == plain.ended == 1

    def test_a_dictionary(self, target):
        output = target.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            do_sample=False,
            max_new_tokens=5,
            return_dict_in_generate=True,
            custom_generate=decoding(target, PROMPT),
        )
        assert output.sequences.shape == (1, PROMPT.shape[1] + 5)

    def test_the_window_ends_an_answer(self, target):
        new = generate(target, decoding(target, PROMPT, eta=0), max_new_tokens=1000)
        assert PROMPT.shape[1] + len(new) in (256, 257)  # the last token needs no place in the cache


class TestSampling:
    SETTINGS = {"do_sample": True, "top_k": 3, "temperature": 0.8, "max_new_tokens": 2}  # noqa: RUF012
    SAMPLES = 600
    # P(total variation > 0.13) <= 2^9 exp(-2 * 600 * 0.13^2) < 1e-6 for the 9 possible pairs of tokens.
    TOLERANCE = 0.13

    def test_the_process_wide_seed_decides(self, target, other):
        def sample(seed, **options):
            torch.manual_seed(seed)
            return generate(target, decoding(other, DRAFT_PROMPT, **options), do_sample=True)

        assert sample(3) == sample(3) != sample(4)
        assert sample(3, eta=0) == sample(3, eta=0)

    def exact(self, model) -> dict[tuple[int, int], float]:
        """Probability of every pair of first tokens, from logits."""

        def top(ids):
            logits = model(torch.tensor([ids])).logits[0, -1] / 0.8
            kept = logits.topk(3)
            return dict(zip(kept.indices.tolist(), kept.values.softmax(-1).tolist(), strict=True))

        with torch.no_grad():
            first = top(PROMPT[0].tolist())
            pairs = {a: top([*PROMPT[0].tolist(), a]) for a in first}
        return {(a, b): first[a] * pairs[a][b] for a in first for b in pairs[a]}

    def distance(self, target, custom) -> float:
        """Total variation between the exact law and samples."""
        torch.manual_seed(0)
        counts: dict[tuple[int, ...], int] = {}
        for _ in range(self.SAMPLES):
            pair = tuple(generate(target, custom, **self.SETTINGS))
            counts[pair] = counts.get(pair, 0) + 1
        exact = self.exact(target)
        return sum(abs(counts.get(k, 0) / self.SAMPLES - exact.get(k, 0)) for k in counts.keys() | exact.keys()) / 2

    def test_without_transfer_the_law_is_the_targets(self, target, other):
        assert self.distance(target, decoding(other, DRAFT_PROMPT, eta=0, num_draft_tokens=3)) < self.TOLERANCE

    def test_with_transfer_the_same_test_fails(self, target):
        # Drafted by a model that is of the same mind about the best three tokens, and less sure.
        unsure = copy.deepcopy(target)
        unsure.lm_head.weight.data *= 0.2
        custom = decoding(unsure, PROMPT, eta=60, law="transfer", num_draft_tokens=3)
        assert self.distance(target, custom) > self.TOLERANCE


class TestRefusals:
    def test_a_batch(self, target):
        with pytest.raises(InvalidParameter, match=r"input_ids must have shape \[1, n\], got \[2, 12\]"):
            target.generate(PROMPT.expand(2, -1), max_new_tokens=4, custom_generate=decoding(target, PROMPT))

    def test_padding(self, target):
        mask = torch.ones_like(PROMPT)
        mask[0, 0] = 0
        with pytest.raises(InvalidParameter, match="attention_mask has zeros"):
            generate(target, decoding(target, PROMPT), attention_mask=mask)

    @pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
    def test_several_sequences(self, target, options):
        with pytest.raises(InvalidParameter, match="set num_beams and num_return_sequences to 1"):
            generate(target, decoding(target, PROMPT), **options)

    @pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"])
    def test_tensors_of_each_step(self, target, name):
        with pytest.raises(InvalidParameter, match=f"leave {name} off"):
            generate(target, decoding(target, PROMPT), return_dict_in_generate=True, **{name: True})

    @pytest.mark.parametrize("draft_prompt", [torch.zeros(1, 0, dtype=torch.long), PROMPT.expand(2, -1), PROMPT[0]])
    def test_draft_prompts(self, target, draft_prompt):
        with pytest.raises(InvalidParameter, match=r"draft_input_ids must have shape \[1, n\]"):
            decoding(target, draft_prompt)

    @pytest.mark.parametrize(
        "options",
        [{"eta": -1}, {"eta": float("nan")}, {"law": "none"}, {"alpha": 2}, {"num_draft_tokens": -1}],
        ids=str,
    )
    def test_settings(self, target, options):
        with pytest.raises(InvalidParameter, match=next(iter(options))):
            decoding(target, PROMPT, **options)

    def test_a_cache_that_cannot_rewind(self, target):
        sliding = llama(0, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
        with pytest.raises(RapidError, match="cannot rewind"):
            generate(target, decoding(sliding, PROMPT))


def test_models_and_configurations_are_left_as_they_were():
    target, draft = llama(0), llama(1)

    def state(model):
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return tensors, model.config.to_dict(), model.generation_config.to_dict(), set(vars(model)), model.training

    before = [state(model) for model in (target, draft)]
    implementation = target.config._attn_implementation
    generate(target, decoding(draft, DRAFT_PROMPT), do_sample=True, top_k=5, eos_token_id=3)
    for model, (tensors, *rest) in zip((target, draft), before, strict=True):
        now, *rest_now = state(model)
        assert rest_now == rest
        assert all(torch.equal(now[name], tensors[name]) for name in itertools.chain(now, tensors))
    assert target.config._attn_implementation == implementation
    assert generate(target) == generate(llama(0))
