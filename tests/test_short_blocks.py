"""The forward pass for a few tokens on a CPU against transformers' own, which is its slow twin."""

import pytest
import torch
import transformers

from rapid.errors import ModelError
from rapid.models import short_blocks
from rapid.models.cache import GrowingCache
from rapid.models.hf import HFModel
from rapid.models.lean import LeanDecoder
from rapid.models.short_blocks import Product, ShortBlocks, has_blocked_products, supports

TEXT = torch.randint(64, (2500,), generator=torch.Generator().manual_seed(0)).tolist()
FAMILIES = {
    "Llama": {},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Llama with head_dim": {"head_dim": 16},
    "Llama, tied": {"tie_word_embeddings": True},
    "Llama, scaled": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
}


def network(family: str, dtype: torch.dtype = torch.float32, **options):
    sizes = {
        "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 4096,
        "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = getattr(transformers, f"{family.split()[0].strip(',')}Config")(**(sizes | FAMILIES[family] | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name:  # else all zeros and ones
                parameter.data.normal_(1, 0.3)
    return made


@pytest.fixture
def timings(monkeypatch):
    """Seconds of products of 1, 2, ... rows, from plain and from blocked weights, instead of a clock's."""
    seconds = {}

    def read(products, inputs):
        way = "blocked" if products[0].__func__ is Product.from_blocked else "plain"
        for product, x in zip(products, inputs, strict=True):
            product(x)  # the inputs are those of the products
        return seconds[way][len(inputs[0]) - 1]

    monkeypatch.setattr(short_blocks, "_seconds", read)
    monkeypatch.setattr(short_blocks, "_TIMED_BYTES", 1)
    monkeypatch.setattr(short_blocks, "_LEAST_ROWS", 4)
    return seconds


def wrapped(model, *, blocked: bool | None) -> HFModel:
    """`blocked` None: transformers' own forward pass."""
    ours = HFModel(model, name="test", vocab_size=60, eos_token_ids=frozenset())
    ours.use_grouped_attention()
    if blocked is not None:
        ours.use_short_blocks(blocked=blocked)
    return ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("blocked", "least_rows"), [(False, 4), (True, 4), (True, 1)])
def test_blocks_equal_the_models_own_forward_pass(family, blocked, least_rows, monkeypatch):
    """Over rewinds, and both below and above the length from which attention is cut into parts."""
    monkeypatch.setattr(short_blocks, "_LEAST_ROWS", least_rows)
    ours = wrapped(network(family), blocked=blocked).new_sequence()
    twin = wrapped(network(family), blocked=None).new_sequence()
    for start in (0, 70, 2100):
        for sequence in (ours, twin):
            sequence.rewind(min(start, sequence.length))
            sequence.prefill(TEXT[sequence.length : start])
        for n in (1, 2, 3, 5, 11, 32, 33):
            position = ours.length
            text = TEXT[position : position + n]
            logits = ours.forward(text)
            assert logits.dtype == torch.float32
            assert logits.shape == (n, 60)
            torch.testing.assert_close(logits, twin.forward(text), atol=1e-3, rtol=1e-3)
            for sequence in (ours, twin):
                sequence.rewind(position + n // 2)


@pytest.mark.parametrize(
    ("plain", "blocked", "least_rows"),
    [
        ([1.7, 2.6, 3.1], [1.0, 1.0, 1.0], 1),  # AMD's Zen 4
        ([0.9, 1.7, 3.1], [1.0, 1.0, 1.0], 2),
        ([0.9, 0.9, 1.0], [1.0, 1.0, 1.0], 4),  # Intel's Sapphire Rapids
        ([1.1, 1.1, 1.1], [1.0, 1.0, 1.0], 4),  # noise
    ],
)
def test_few_rows_take_the_weights_that_are_clearly_faster(plain, blocked, least_rows, timings):
    timings.update(plain=plain, blocked=blocked)
    blocks = ShortBlocks(network("Llama"), blocked=True)
    products = [blocks.head, *(product for layer in blocks.layers for product in (layer.qkv, layer.out, layer.down))]
    assert {product.least_rows for product in products} == {least_rows}


def test_small_models_and_plain_weights_are_not_timed(timings, monkeypatch):
    assert ShortBlocks(network("Llama"), blocked=False).head.least_rows == 4
    assert ShortBlocks(network("Llama", torch.bfloat16), blocked=True).head.least_rows == 4
    monkeypatch.setattr(short_blocks, "_TIMED_BYTES", 2**30)
    assert ShortBlocks(network("Llama"), blocked=True).head.least_rows == 4


def test_products_are_timed_by_their_fastest_run(monkeypatch):
    ticks = iter([0.0, 3.0, 3.0, 5.0, 5.0, 9.0, 9.0, 13.0, 13.0, 17.0])
    monkeypatch.setattr(short_blocks.time, "perf_counter", lambda: next(ticks))
    seen = []
    assert short_blocks._seconds([seen.append, seen.append], [1, 2]) == 2.0
    assert seen == [1, 2] * 5


def test_positions_and_the_last_logits_only():
    ours, twin = wrapped(network("Qwen2"), blocked=True), wrapped(network("Qwen2"), blocked=None)
    results = []
    for model in (ours, twin):
        cache = GrowingCache(model.num_layers)
        model.run(TEXT[:20], cache, logits_to_keep=1)
        results.append(model.run(TEXT[20:26], cache, logits_to_keep=2, first_position=300))
    assert results[0].shape == (2, 60)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    near = ours.run(TEXT[20:26], GrowingCache(ours.num_layers), logits_to_keep=2)
    assert not torch.allclose(near, results[0], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_keep_no_second_copy(dtype):
    model = network("Llama", dtype)
    blocks = ShortBlocks(model, blocked=True)
    assert blocks.head.blocked is None
    twin, ours = wrapped(network("Llama", dtype), blocked=None), wrapped(network("Llama", dtype), blocked=True)
    logits = [m.run(TEXT[:8], GrowingCache(2), logits_to_keep=0) for m in (ours, twin)]
    torch.testing.assert_close(*logits, atol=0.4 if dtype == torch.bfloat16 else 1e-5, rtol=0.05)


def test_packed_layers_use_their_own_products():
    ours = wrapped(network("Llama"), blocked=None)
    ours.use_packed_linears()
    before = ours.run(TEXT[:8], GrowingCache(2), logits_to_keep=0)
    ours.use_short_blocks()
    assert torch.allclose(ours.run(TEXT[:8], GrowingCache(2), logits_to_keep=0), before, atol=1e-4)


def test_what_is_not_supported_keeps_transformers_forward():
    assert supports(network("Llama"))
    assert not supports(network("Llama", hidden_act="gelu"))
    assert not supports(network("Mistral", sliding_window=64))
    ours = wrapped(network("Llama", hidden_act="gelu"), blocked=True)
    assert ours._short_blocks is None
    with pytest.raises(ModelError, match="gelu"):
        LeanDecoder(network("Llama", hidden_act="gelu"))


def test_a_pytorch_without_the_products(monkeypatch):
    class Refuses:
        def __getattr__(self, name):
            raise AttributeError(name)

    assert has_blocked_products()
    monkeypatch.setattr(short_blocks.torch.ops, "mkldnn", Refuses())
    assert not has_blocked_products()
    blocks = ShortBlocks(network("Llama"), blocked=True)
    assert blocks.head.blocked is None
