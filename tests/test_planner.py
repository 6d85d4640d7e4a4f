"""The planner: parameter counts of published models, the paper's speed-ups, the refusals."""

from __future__ import annotations

import pytest

from rapid.errors import InvalidParameter, ModelError
from rapid.planning import GIB, HARDWARE, SPARE_TOKENS, ModelShape, check_fits, measure_host, plan

K = 1024
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "model_type": "llama",
}
QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "model_type": "qwen2",
}
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "model_type": "llama",
}
# Fig. 1 (tokens per second of the 8B by context) and Fig. 3 (acceptance, speed-up) of the paper.
DECODE_RATES = {
    K: 39.7,
    2 * K: 39.6,
    4 * K: 39.4,
    8 * K: 38.4,
    16 * K: 34.8,
    32 * K: 29.0,
    64 * K: 21.4,
    128 * K: 12.9,
}
FIGURE_3 = [
    (4 * K, 0.75, 0.74),
    (8 * K, 0.76, 0.80),
    (16 * K, 0.78, 0.93),
    (32 * K, 0.81, 1.11),
    (64 * K, 0.81, 1.42),
    (128 * K, 0.79, 2.02),
]


@pytest.mark.parametrize(
    ("config", "count"), [(LLAMA_8B, 8_030_261_248), (QWEN_7B, 7_615_616_512), (SMOLLM2, 134_515_008)]
)
def test_parameter_counts_are_the_published_ones(config, count):
    assert ModelShape.from_config(config).num_parameters == count


def test_cache_sizes_are_the_known_ones():
    assert ModelShape.from_config(LLAMA_8B).cache_bytes_per_token == 131_072
    assert ModelShape.from_config(SMOLLM2, dtype="float32").cache_bytes_per_token == 46_080


@pytest.mark.parametrize(("context", "acceptance", "published"), FIGURE_3)
def test_figure_3_follows_from_figure_1(context, acceptance, published):
    hardware = HARDWARE["a800"].calibrated(DECODE_RATES)
    predicted = plan(ModelShape.from_config(LLAMA_8B), hardware, context, acceptance_rate=acceptance).speed_up
    assert predicted == pytest.approx(published, rel=0.08)


def test_figure_3_does_not_follow_from_the_data_sheet():
    """The control: the paper's times are launch-bound, which bandwidth alone does not know."""
    shape = ModelShape.from_config(LLAMA_8B)
    errors = [abs(plan(shape, HARDWARE["a800"], n, acceptance_rate=a).speed_up / s - 1) for n, a, s in FIGURE_3]
    assert max(errors) > 0.08


@pytest.mark.parametrize(("num_draft_tokens", "speed_up"), [(10, 1.46), (5, 1.52)])
def test_bandwidth_bound_of_an_h200(num_draft_tokens, speed_up):
    """8B at 128K, drafter at 5.3K, each token kept with probability .955: sum of powers gives the rate."""
    kept = sum(0.955**i for i in range(1, num_draft_tokens + 1)) / num_draft_tokens
    result = plan(
        ModelShape.from_config(LLAMA_8B),
        HARDWARE["h200"],
        128 * K,
        retrieved=5_400,
        num_draft_tokens=num_draft_tokens,
        acceptance_rate=kept,
    )
    assert result.decode_s == pytest.approx(7.7e-3, rel=0.05)
    assert result.draft_step_s == pytest.approx(3.9e-3, rel=0.08)
    assert result.speed_up == pytest.approx(speed_up, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "length", "num_tokens", "milliseconds"),
    [
        ("float32-packed", 1024, 1, 53),
        ("float32-packed", 8192, 1, 125),
        ("float32-packed", 4096, 5, 112),
        ("float32-packed", 8192, 5, 210),
        ("float32", 1024, 1, 67),
        ("float32", 8192, 1, 136),
    ],
)
def test_measured_cpu_steps(dtype, length, num_tokens, milliseconds):
    """SmolLM2 with an fp32 cache on one core; the plan is a guide, within a quarter."""
    shape = ModelShape.from_config(SMOLLM2, dtype=dtype)
    assert HARDWARE["cpu"].step_s(shape, length, num_tokens) * 1e3 == pytest.approx(milliseconds, rel=0.25)


def test_calibrated_times_are_met_and_grow():
    shape = ModelShape.from_config(LLAMA_8B)
    hardware = HARDWARE["a800"].calibrated(DECODE_RATES)
    for length, rate in DECODE_RATES.items():
        assert hardware.step_s(shape, length) == pytest.approx(1 / rate)
    times = [hardware.step_s(shape, length) for length in range(512, 300 * K, 4096)]
    assert times == sorted(times)
    # Beyond the last measurement: the line through the last two.
    assert hardware.step_s(shape, 192 * K) == pytest.approx(2 / 12.9 - 1 / 21.4)


def test_peak_is_the_sum_of_its_parts():
    shape = ModelShape.from_config(LLAMA_8B)
    result = plan(shape, HARDWARE["h200"], 128 * K, max_new_tokens=1000)
    assert result.weight_bytes == 2 * 8_030_261_248
    assert result.target_cache_bytes == 131_072 * (128 * K + 1000 + SPARE_TOKENS)
    assert result.draft_cache_bytes == 131_072 * (4096 + 1000 + SPARE_TOKENS)
    assert result.peak_bytes > result.weight_bytes + result.target_cache_bytes + result.draft_cache_bytes
    larger = plan(shape, HARDWARE["h200"], 128 * K, drafter=ModelShape.from_config(QWEN_7B))
    assert larger.weight_bytes == result.weight_bytes + 2 * 7_615_616_512


@pytest.mark.parametrize(
    ("dtype", "context", "measured"),
    [
        ("float32", 2875, 1862),
        ("float32", 5987, 1950),
        ("float32-packed", 2875, 1782),
        ("float32-packed", 5987, 1907),  # measured after the constants were fixed
    ],
)
def test_the_peak_memory_of_the_embedded_model(dtype, context, measured):
    """MiB of `rapid ask` with SmolLM2, 24 new tokens and about 1,000 retrieved, by the kernel's count."""
    shape = ModelShape.from_config(SMOLLM2, dtype)
    predicted = plan(shape, HARDWARE["cpu"], context, retrieved=1000, max_new_tokens=24).peak_bytes / 2**20
    assert predicted == pytest.approx(measured, rel=0.1)


def test_what_does_not_fit_is_refused_with_figures_and_a_way_out():
    shape = ModelShape.from_config(LLAMA_8B)
    result = plan(shape, HARDWARE["a800"], 128 * K)
    check_fits(result, result.peak_bytes)
    with pytest.raises(ModelError, match=r"131,072 tokens need 3\d\.\d GiB .* 24\.0 GiB are free") as caught:
        check_fits(result, 24 * GIB)
    assert "\n" not in str(caught.value)
    longest = int(str(caught.value).split("at most ")[1].split()[0].replace(",", ""))
    check_fits(plan(shape, HARDWARE["a800"], longest), 24 * GIB)
    with pytest.raises(ModelError):  # what it names is safe, and nearly all there is
        check_fits(plan(shape, HARDWARE["a800"], round(1.05 * longest)), 24 * GIB)
    with pytest.raises(ModelError, match="smaller model"):
        check_fits(result, 8 * GIB)


@pytest.mark.parametrize(
    "change",
    [{"num_local_experts": 8}, {"torch_dtype": "float8_e4m3fn"}, {"hidden_size": None, "remove": "hidden_size"}],
)
def test_configs_the_sums_do_not_hold_for_are_refused(change):
    config = {**LLAMA_8B, **change}
    config.pop(config.pop("remove", ""), None)
    with pytest.raises(ModelError):
        ModelShape.from_config(config)


def test_bad_settings_are_refused():
    shape = ModelShape.from_config(SMOLLM2)
    with pytest.raises(InvalidParameter):
        plan(shape, HARDWARE["cpu"], 0)
    with pytest.raises(InvalidParameter):
        plan(shape, HARDWARE["cpu"], 100, acceptance_rate=1.5)
    with pytest.raises(InvalidParameter):
        HARDWARE["cpu"].calibrated({1024: 0.0})


def test_this_machine_can_be_measured():
    host = measure_host(seconds=0.05)
    assert 1e8 < host.bandwidth < 1e13
    assert 1e8 < host.flops_per_s < 1e14
