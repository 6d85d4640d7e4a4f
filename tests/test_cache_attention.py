"""The cache and the attention against transformers' DynamicCache and eager attention, and what is refused by name."""

import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaForCausalLM

from rapid.errors import ModelError, PromptTooLong
from rapid.models import attention, hf
from rapid.models.cache import GrowingCache, GrowingLayer
from rapid.models.hf import HFModel, refuse_if_it_cannot_rewind
from rapid.models.toy import tiny

HEADS = {"multi-head": (4, 4), "grouped-query": (6, 2), "multi-query": (4, 1)}
TEXT = torch.randint(64, (900,), generator=torch.Generator().manual_seed(0)).tolist()


class EagerTwin:
    """The slow, plain reading: stock eager attention over a DynamicCache."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        model.set_attn_implementation("eager")
        self.model, self.cache = model, DynamicCache(config=model.config)
        parameters = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def forward(self, token_ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([token_ids]), use_cache=True, **{self.argument: self.cache}).logits[0]

    def rewind(self, length: int) -> None:
        self.cache.crop(length - self.cache.get_seq_length())


def pair(heads: str, **options) -> tuple[hf.HFSequence, EagerTwin]:
    query_heads, kv_heads = HEADS[heads]
    ours = tiny(0, heads=query_heads, kv_heads=kv_heads)
    ours.cache_dtype = options.get("cache_dtype")
    theirs = tiny(0, heads=query_heads, kv_heads=kv_heads)
    return ours.new_sequence(), EagerTwin(theirs.model)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-3) -> None:
    """The toy model's large random weights amplify rounding: over 400 tokens its logits (standard deviation 3.6) are
    up to 2e-4 from float64 in transformers' own eager pass, by another amount on each machine. A wrong mask or
    position moves them by tenths, one wrong row of 400 by hundredths; the mean sees what the maximum lets pass."""
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert (ours - theirs).abs().mean() <= tolerance / 20


def test_one_wrong_row_of_the_cache_is_seen():
    """Negative control of the tolerance above."""
    ours, theirs = pair("grouped-query")
    ours.forward(TEXT[:399])
    theirs.forward(TEXT[:399])
    with torch.inference_mode():
        ours.cache.growing[0].keys[:, :, 200] = ours.cache.growing[0].keys[:, :, 201]
    with pytest.raises(AssertionError):
        close(ours.forward(TEXT[399:401]), theirs.forward(TEXT[399:401]))


# --- the slow twin ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block", [1, 2, 5, 11, 32, 33, 200])
def test_blocks_with_rewinds_equal_the_eager_model(heads, block):
    """Read, read a block, take half of it back, read another: as decoding does. 33 takes the tiled kernel."""
    ours, theirs = pair(heads)
    close(ours.forward(TEXT[:70]), theirs.forward(TEXT[:70]))
    position = 70
    for _ in range(4):
        text = TEXT[position : position + block]
        close(ours.forward(text), theirs.forward(text))
        position += block // 2
        ours.rewind(position)
        theirs.rewind(position)
        assert ours.cache.get_seq_length() == ours.length == position
        other = [t ^ 1 for t in text]
        close(ours.forward(other), theirs.forward(other))
        ours.rewind(position)
        theirs.rewind(position)


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_equals_one_pass(heads):
    """900 tokens in chunks of 512, read without logits; and a second prefill behind the first."""
    ours, theirs = pair(heads)
    progress = []
    ours.prefill(TEXT[:700], lambda done, total: progress.append((done, total)))
    ours.prefill(TEXT[700:899])
    theirs.forward(TEXT[:899])
    close(ours.forward(TEXT[899:]), theirs.forward(TEXT[899:]))
    assert progress == [(512, 700), (700, 700)]
    assert ours.token_ids == TEXT


def test_growth_across_allocation_borders():
    """Token by token over the first allocation's end and the next ones, equal to one pass."""
    ours, _ = pair("grouped-query")
    stepwise = torch.cat([ours.forward([token]) for token in TEXT[:400]])
    capacity = ours.cache.growing[0].capacity
    assert capacity > 400
    fresh, _ = pair("grouped-query")
    close(stepwise, fresh.forward(TEXT[:400]))


def test_a_float16_cache_takes_half_the_bytes_and_is_nearly_as_good():
    half, theirs = pair("grouped-query", cache_dtype=torch.float16)
    full, _ = pair("grouped-query")
    for block in (TEXT[:300], TEXT[300:301], TEXT[301:310]):
        expected = theirs.forward(block)
        assert (half.forward(block) - expected).abs().mean() < 5e-3 * expected.std()
        full.forward(block)
    assert half.cache.num_bytes * 2 == full.cache.num_bytes
    query, key, value = (torch.randn(1, heads, n, 8) for heads, n in ((4, 3), (2, 200), (2, 200)))
    for attend in (attention.grouped_attention, attention.tiled_attention):
        close(attend(query, key.half(), value.half(), 0.35), attend(query, key, value, 0.35), tolerance=2e-3)


FAMILIES = [
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma", "Granite", "Olmo2", "Glm4", "Cohere"),
    *("SmolLM3", "GPT2", "GPTNeoX", "OPT", "Starcoder2", "DeepseekV3"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models(family):
    """Each family hands its attention other arguments (scales, biases, key and value heads of unequal size)."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.4,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family in ("GPT2", "GPTNeoX", "OPT"):
        sizes |= {"word_embed_proj_dim": 32, "ffn_dim": 48} if family == "OPT" else {}
    else:
        sizes["num_key_value_heads"] = 4 if family == "DeepseekV3" else 2
    if family in ("Gemma", "Qwen3", "Glm4"):
        sizes["head_dim"] = 8
    if family == "Mistral":
        sizes["sliding_window"] = None
    if family == "Phi3":
        sizes["sliding_window"] = 4096  # wider than its longest text, as in the published weights
    if family == "DeepseekV3":
        sizes |= {
            "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config).eval()
    blocks = [TEXT[:60], TEXT[60:61], TEXT[61:66], TEXT[66:101]]
    twin = EagerTwin(network)
    expected = [twin.forward(block) for block in blocks]

    model = HFModel(network, name=family, vocab_size=64, eos_token_ids=frozenset())
    model.use_grouped_attention()
    sequence = model.new_sequence()
    for block, logits in zip(blocks, expected, strict=True):
        close(sequence.forward(block), logits, tolerance=1e-3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (4, 4)])
@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("length", [1536, 1537, 1601])
def test_a_cache_cut_into_parts_gives_the_attention_over_all_of_it(heads, kv_heads, parts, n, length):
    """Lengths that can be divided and others; keys beyond the length are garbage that must not be read."""
    query = torch.randn(1, heads, n, 8)
    key, value = (torch.full((1, kv_heads, 1700, 8), torch.nan) for _ in range(2))
    key[:, :, :length], value[:, :, :length] = torch.randn(2, 1, kv_heads, length, 8)
    key, value = key[:, :, :length], value[:, :, :length]
    rows = query.reshape(1, kv_heads, -1, 8)
    ours = attention.split_cache_attention(rows, key, value, n, 0.3, parts)
    mask = torch.ones(n, length, dtype=torch.bool).tril_(length - n)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    close(ours.view(1, heads, n, 8), expected, tolerance=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (4, 4)])
@pytest.mark.parametrize("n", [2, 5, 32])
@pytest.mark.parametrize("length", [32, 700])
def test_attention_by_plain_products(heads, kv_heads, n, length):
    """Values may be of another size than keys; keys beyond the length are garbage that must not be read."""
    query = torch.randn(1, heads, n, 8)
    key, value = (torch.full((1, kv_heads, 800, d), torch.nan)[:, :, :length] for d in (8, 5))
    key.normal_(), value.normal_()
    ours = attention.product_attention(query.reshape(1, kv_heads, -1, 8), key, value, n, 0.3)
    mask = torch.ones(n, length, dtype=torch.bool).tril_(length - n)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    close(ours.view(1, heads, n, 5), expected, tolerance=1e-5)


def test_products_are_taken_for_blocks_whose_scores_may_be_held(monkeypatch):
    taken = []
    products = attention.product_attention
    monkeypatch.setattr(attention, "product_attention", lambda *a: taken.append(a[3]) or products(*a))
    monkeypatch.setattr(attention, "_MOST_SCORES", 6 * 8 * 300)
    key = torch.randn(1, 2, 300, 8)
    for n in (1, 5, 8, 9):
        attention.grouped_attention(torch.randn(1, 6, n, 8), key, key, 0.3)
    attention.grouped_attention(torch.randn(1, 6, 5, 8), key.half(), key.half(), 0.3)
    assert taken == [5, 8]


def test_parts_occupy_all_threads_and_are_not_too_short():
    assert [attention.num_parts(3, 8000, threads) for threads in (1, 2, 3, 4, 8)] == [1, 2, 1, 4, 8]
    assert [attention.num_parts(2, 8000, threads) for threads in (2, 16)] == [1, 8]
    assert attention.num_parts(3, 8000, 64) == 8000 // 512
    assert attention.num_parts(3, 100, 2) == 1


def test_a_long_cache_is_cut(monkeypatch):
    """The grouped attention takes the parts where they pay, in the dtype the cache is stored in."""
    query, key, value = (torch.randn(1, heads, n, 8) for heads, n in ((6, 5), (3, 2100), (3, 2100)))
    monkeypatch.setattr(attention, "num_parts", lambda *_: 1)
    whole = attention.grouped_attention(query, key, value, 0.3)
    monkeypatch.setattr(attention, "num_parts", lambda *_: 4)
    assert not torch.equal(attention.grouped_attention(query, key, value, 0.3), whole)
    close(attention.grouped_attention(query, key, value, 0.3), whole, tolerance=1e-5)
    close(attention.grouped_attention(query, key.half(), value.half(), 0.3), whole, tolerance=2e-3)


def test_attention_with_values_of_another_size():
    query, key, value = (torch.randn(1, heads, n, d) for heads, n, d in ((4, 3, 8), (2, 20, 8), (2, 20, 5)))
    mask = torch.ones(3, 20, dtype=torch.bool).tril_(17)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    close(attention.grouped_attention(query, key, value, 0.3), expected)
    close(attention.tiled_attention(query, key, value, 0.3), expected)


# --- the cache by itself ---------------------------------------------------------------------------------------


def states(n: int, seed: int) -> torch.Tensor:
    return torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(seed))


def test_views_hold_what_was_written():
    layer = GrowingLayer()
    written = torch.empty(1, 2, 0, 4)
    for step, n in enumerate([3, 1, 300, 1, 500, 1]):
        new = states(n, step)
        written = torch.cat([written, new], dim=-2)
        keys, values = layer.update(new, -new)
        assert torch.equal(keys, written)
        assert torch.equal(values, -written)
        assert layer.get_mask_sizes(5) == (written.shape[-2] + 5, 0)
    layer.rewind(200)
    keys, _ = layer.update(states(2, 99), states(2, 99))
    assert torch.equal(keys, torch.cat([written[..., :200, :], states(2, 99)], dim=-2))


def test_a_rewind_moves_no_memory():
    layer = GrowingLayer()
    layer.update(states(100, 0), states(100, 0))
    address = layer.keys.data_ptr()
    layer.rewind(40)
    layer.update(states(10, 1), states(10, 1))
    assert layer.keys.data_ptr() == address
    layer.rewind(1000)  # beyond the end: nothing to forget
    assert layer.get_seq_length() == 50


def test_reserved_room_is_allocated_once():
    cache = GrowingCache(2)
    cache.reserve(1000)
    for layer in range(2):
        cache.update(states(3, 0), states(3, 0), layer)
    addresses = [layer.keys.data_ptr() for layer in cache.growing]
    for start in range(3, 1000, 50):
        for layer in range(2):
            cache.update(states(min(50, 1000 - start), start), states(min(50, 1000 - start), start), layer)
    assert [layer.keys.data_ptr() for layer in cache.growing] == addresses
    assert cache.get_seq_length() == 1000
    kept = cache.growing[0].keys[..., :1000, :].clone()
    cache.reserve(5000)
    assert cache.growing[0].capacity >= 5000
    assert torch.equal(cache.growing[0].keys[..., :1000, :], kept)
    cache.reserve(10)  # never shrinks
    assert cache.growing[0].capacity >= 5000


def test_reset_forgets():
    cache = GrowingCache(1)
    cache.update(states(3, 0), states(3, 0), 0)
    cache.reset()
    assert cache.get_seq_length() == 0


# --- sequences -------------------------------------------------------------------------------------------------


def test_two_sequences_share_weights_and_no_cache():
    model = tiny(0)
    one, two = model.new_sequence(), model.new_sequence()
    one.prefill(TEXT[:50])
    assert (one.length, two.length) == (50, 0)
    close(two.forward(TEXT[:5]), model.new_sequence().forward(TEXT[:5]))


def test_the_window_is_an_error_and_not_a_position_beyond_it():
    sequence = tiny(0, window=16).new_sequence()
    sequence.prefill(TEXT[:15])
    for read in (sequence.prefill, sequence.forward):
        with pytest.raises(PromptTooLong, match=r"17 tokens do not fit the window of 16 of tiny-0"):
            read(TEXT[15:17])
    sequence.forward(TEXT[15:16])
    assert sequence.length == 16


@pytest.mark.parametrize("length", [-1, 6])
def test_rewinding_to_nowhere_is_an_error(length):
    sequence = tiny(0).new_sequence()
    sequence.prefill(TEXT[:5])
    with pytest.raises(ValueError, match="cannot rewind 5 tokens"):
        sequence.rewind(length)


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.MistralConfig(sliding_window=4096, max_position_embeddings=32768), "sliding_attention"),
        (transformers.Gemma2Config(), "sliding_attention"),
        (transformers.Gemma3TextConfig(), "sliding_attention"),
        (transformers.Qwen3NextConfig(), "linear_attention"),
        (transformers.Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2), "conv"),
        (transformers.MambaConfig(), "mamba"),
        (transformers.Mamba2Config(), "mamba2"),
        (transformers.RwkvConfig(), "rwkv"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.JambaConfig(), "linear_attention"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_cannot_rewind_are_refused_by_name(config, words):
    with pytest.raises(ModelError, match=r"some/model") as error:
        refuse_if_it_cannot_rewind(config, "some/model")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.MistralConfig(sliding_window=None),
        transformers.MistralConfig(sliding_window=32768, max_position_embeddings=32768),
        transformers.Qwen2Config(sliding_window=4096, use_sliding_window=False),
        transformers.Qwen3Config(),
        transformers.GPT2Config(),
        transformers.Phi3Config(),
        transformers.SmolLM3Config(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_with_full_attention_are_welcome(config):
    refuse_if_it_cannot_rewind(config, "some/model")


def test_no_model_with_a_forgetting_cache_slips_through():
    """Every causal LM of transformers with its default settings: whatever is accepted gets a cache of layers that
    only grow from transformers itself."""
    from transformers.cache_utils import DynamicLayer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    accepted, refused = [], []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.CONFIG_MAPPING[name]().get_text_config(decoder=True)
        except Exception:  # a few configurations have no defaults
            continue
        try:
            refuse_if_it_cannot_rewind(config, name)
        except ModelError:
            refused.append(name)
            continue
        accepted.append(name)
        if (getattr(config, "sliding_window", None) or 0) >= (getattr(config, "max_position_embeddings", 0) or 1):
            continue  # a window as wide as the longest text never slides
        assert {type(layer) for layer in DynamicCache(config=config).layers} <= {DynamicLayer}, name
    assert len(accepted) > 50
    assert len(refused) > 20


def test_a_padded_batch_is_refused():
    model = tiny(0).model
    ids = torch.tensor([TEXT[:6]])
    padded = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="one unpadded sequence"):
        model(ids, attention_mask=padded)
    with pytest.raises(ValueError, match="one unpadded sequence"):
        model(ids.repeat(2, 1))
    model(ids, attention_mask=torch.ones_like(ids))  # a mask of ones masks nothing


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "sliding_window"])
def test_arguments_it_would_ignore_are_refused(name):
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=name):
        attention._attention_forward(torch.nn.Module(), query, query, query, None, scaling=1.0, **{name: 2})


def test_packing_is_refused_where_there_are_no_products_for_it(monkeypatch):
    model = tiny(0)
    monkeypatch.setattr("rapid.models.packing.can_pack", lambda device: False)
    with pytest.raises(ModelError, match="use float32"):
        model.use_packed_linears()
    assert not model.packed
