"""The GPU kit on a CPU: static cache, split attention, lean forward pass, verdicts on the device, and the benchmark.

Without CUDA no graph is captured; everything a graph would hold runs eagerly, against its slow twin. What a GPU makes
of it is unmeasured here.
"""

import importlib
import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rapid.decode.control import FixedDraft
from rapid.decode.loop import DecodeSettings, decode
from rapid.decode.stop import StopRule
from rapid.drafting.model import ModelDrafter
from rapid.errors import ModelError, PromptTooLong
from rapid.models.graphs import BLOCK_BUCKETS, BlockRunner, GraphSequence, block_bucket
from rapid.models.lean import LeanDecoder
from rapid.models.split_attention import (
    FlashOld,
    FrozenOld,
    PlainOld,
    attend,
    block_mask,
    capacity_bucket,
    join,
    sdpa_cudnn,
    sdpa_flash,
    split_attention,
)
from rapid.models.static_cache import StaticCache
from rapid.models.toy import tiny
from rapid.params import LAWS
from rapid.sampling.device import draw_token, verify_block
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp
from rapid.types import Proposal
from test_laws import closed_form, total_variation, tv_bound

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
gpu, gpu_loop, gpu_model, gpu_report, gpu_sections = (
    importlib.import_module(name) for name in ("gpu", "gpu_loop", "gpu_model", "gpu_report", "gpu_sections")
)

PATHS = {"formula": PlainOld(), "frozen": FrozenOld(sdpa_flash), "frozen, short steps": FrozenOld(sdpa_flash, step=64)}


# --- forward pass ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_logits_are_those_of_the_plain_sequence_over_rounds_with_rejections(path):
    model = tiny(0, vocab_size=60, head_rows=64)
    prompt = torch.randint(60, (1300,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = model.new_sequence()
    static = GraphSequence(LeanDecoder(model.model, vocab_size=60), 1600, attention=PATHS[path])
    plain.prefill(prompt)
    static.prefill(prompt)
    numbers = random.Random(0)
    for _ in range(25):
        block = [numbers.randrange(60) for _ in range(numbers.randint(1, 18))]
        expected, logits = plain.forward(block), static.forward(block)
        assert logits.shape == (len(block), 60)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
        kept = plain.length - numbers.randint(0, len(block) - 1)
        plain.rewind(kept)
        static.rewind(kept)
        assert static.token_ids == plain.token_ids


class Recorded:
    """What a CUDA graph does, on a CPU: the operations of one forward pass, with every number of the host as it was
    when they were recorded, run again on the same tensors."""

    def __init__(self, runner, size, bucket):
        cache, ids = runner.cache, torch.zeros(size, dtype=torch.int64)
        self.tensors = (cache.device_length, cache.keys, cache.values)

        def forward(ids, *tensors):
            cache.device_length, cache.keys, cache.values = tensors
            return runner.decoder.forward(ids, cache, runner.attention, bucket)

        self.program = make_fx(forward)(ids, *self.tensors)
        self.ids = ids
        cache.device_length, cache.keys, cache.values = self.tensors

    def replay(self, ids):
        self.ids[: len(ids)] = ids
        return self.program(self.ids, *self.tensors)


@pytest.mark.parametrize("path", PATHS)
def test_a_recorded_pass_serves_every_length_of_its_bucket(path, monkeypatch):
    recorded = []

    def capture(runner, size, bucket):
        recorded.append((size, bucket))
        return Recorded(runner, size, bucket)

    monkeypatch.setattr(BlockRunner, "_capture", capture)
    model = tiny(0)
    decoder = LeanDecoder(model.model)
    plain, static = model.new_sequence(), GraphSequence(decoder, 300, attention=PATHS[path], graphs=True)
    prompt = torch.randint(64, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    plain.prefill(prompt)
    static.prefill(prompt)
    assert recorded == []  # long blocks are not recorded
    numbers = random.Random(1)
    for _ in range(16):
        block = [numbers.randrange(64) for _ in range(numbers.choice((1, 2, 6, 7)))]
        torch.testing.assert_close(static.forward(block), plain.forward(block), atol=1e-3, rtol=1e-3)
        kept = plain.length - numbers.randint(0, len(block) - 1)
        plain.rewind(kept)
        static.rewind(kept)
    assert len(recorded) == len(set(recorded))
    assert {size for size, _ in recorded} == {1, 2, 7}
    buckets = {bucket for _, bucket in recorded}
    assert buckets == {"formula": {317}, "frozen": {0}, "frozen, short steps": {64, 128}}[path]

    runner = BlockRunner(decoder, decoder.new_cache(300), attention=PATHS[path], graphs=True)
    recorded.clear()
    runner.prepare(140, 2)
    expected = {"formula": {0, 300}, "frozen": {0}, "frozen, short steps": {0, 64, 128}}[path]
    assert set(recorded) == set(itertools.product((1, 2), expected))


def test_the_decode_loop_runs_on_graph_sequences():
    model = tiny(4)
    prompt = torch.randint(64, (80,), generator=torch.Generator().manual_seed(6)).tolist()
    decoder, emitted = LeanDecoder(model.model), []
    for new_sequence in (model.new_sequence, lambda: GraphSequence(decoder, 150)):
        target, drafter = new_sequence(), ModelDrafter(new_sequence(), prompt[40:], ())
        target.prefill(prompt[:-1])
        drafter.start()
        settings = DecodeSettings(TokenWarp(0.8), AcceptanceRule("paper", 10.0), FixedDraft("model", 4))
        generator = torch.Generator().manual_seed(0)
        rounds = decode(target, prompt, {"model": drafter}, settings, StopRule(50), generator)
        emitted.append([done.token_ids for done in rounds])
    assert emitted[0] == emitted[1]
    assert {1, 5} <= {len(tokens) for tokens in emitted[0]}


def test_a_padded_block_leaves_no_trace():
    """Six tokens are read as seven; the seventh must not be seen by what follows."""
    decoder = LeanDecoder(tiny(0).model)
    whole, split = GraphSequence(decoder, 64), GraphSequence(decoder, 64)
    ids = list(range(10, 26))
    expected = whole.forward(ids)
    logits = torch.cat([split.forward(ids[:6]), split.forward(ids[6:14]), split.forward(ids[14:])])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Qwen2", "Mistral", "Llama"])
def test_other_architectures_and_rotary_embeddings(kind):
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    options = {"Mistral": {"sliding_window": None}, "Qwen2": {}, "Llama": gpu_model.TINY}[kind]
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **options, "initializer_range": 0.3})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(64, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]
    logits = GraphSequence(LeanDecoder(model), 64).forward(ids.tolist())
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_joined_projections_stay_one_copy_and_the_model_goes_on_working():
    model = tiny(0)
    before = model.new_sequence().forward([1, 2, 3])
    parameters = model.num_parameters
    decoder = LeanDecoder(model.model)
    attention = model.model.model.layers[0].self_attn
    views = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert views == {decoder.layers[0].qkv.weight.untyped_storage().data_ptr()}
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.model.parameters()}
    assert sum(storages.values()) == 4 * parameters
    torch.testing.assert_close(model.new_sequence().forward([1, 2, 3]), before)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "architecture is gpt2"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"sliding_window": 16}, "sliding window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "embedding is dynamic"),
    ],
)
def test_a_model_of_another_shape_is_refused(changes, reason):
    model = tiny(0).model
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match=reason):
        LeanDecoder(model)


def test_packed_layers_are_refused():
    model = tiny(0)
    model.model.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    with pytest.raises(ModelError, match="without packing"):
        LeanDecoder(model.model)


def test_the_window_and_the_capacity_are_held():
    decoder = LeanDecoder(tiny(0).model)
    sequence = GraphSequence(decoder, 8)
    sequence.prefill([1] * 6)
    with pytest.raises(PromptTooLong, match="9 tokens do not fit the 8"):
        sequence.forward([1, 2, 3])
    assert (sequence.length, sequence.forward([1, 2]).shape[0]) == (6, 2)
    with pytest.raises(PromptTooLong, match="static cache of 4"):
        BlockRunner(decoder, decoder.new_cache(4)).run(torch.arange(5))


# --- cache and buckets -----------------------------------------------------------------------------------------------


def test_the_cache_keeps_both_lengths_alike_and_rewinds():
    cache = StaticCache(1, 2, 4, 16, dtype=torch.float32, device=torch.device("cpu"))
    cache.write(0, cache.positions(3), torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    assert cache.positions(2).tolist() == [0, 1]  # written, not yet counted
    cache.advance(3)
    cache.rewind(2)
    assert (cache.length, cache.device_length.tolist(), cache.positions(2).tolist()) == (2, [2], [2, 3])
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="cannot rewind 2 tokens"):
            cache.rewind(wrong)
    with pytest.raises(ValueError, match="do not fit"):
        cache.advance(15)


def test_buckets():
    assert [block_bucket(n) for n in (1, 2, 5, 6, 8, 10, 11, 12, 17, 18, 512)] == [
        1,
        2,
        5,
        7,
        9,
        11,
        11,
        13,
        17,
        18,
        512,
    ]
    assert all(block_bucket(size) == size for size in BLOCK_BUCKETS)
    assert [capacity_bucket(n, 140_000) for n in (0, 1, 1024, 1025, 8193)] == [0, 1024, 1024, 2048, 9216]
    assert capacity_bucket(131_073, 132_000) == 132_000
    for length in range(16_385, 140_000, 911):
        assert length <= capacity_bucket(length, 200_000) <= length * 9 / 8
    assert [FrozenOld(sdpa_flash).bucket(n, 4096) for n in (0, 511, 512, 1500)] == [0, 0, 512, 1024]


# --- split attention -------------------------------------------------------------------------------------------------


def attention_case(length, n, heads=6, kv_heads=2, capacity=200, head_dim=16):
    generator = torch.Generator().manual_seed(length + n)
    query, keys, values = (
        torch.randn(h, m, head_dim, generator=generator)
        for h, m in ((heads, n), (kv_heads, capacity), (kv_heads, capacity))
    )
    return query, keys, values


def plain_attention(query, keys, values, length, scaling):
    """Every head, row and key, by the definition, in float64."""
    heads, n, head_dim = query.shape
    group = heads // keys.shape[0]
    out = torch.zeros(n, heads, head_dim, dtype=torch.float64)
    for head, i in itertools.product(range(heads), range(n)):
        k, v = (x[head // group, : length + i + 1].double() for x in (keys, values))
        out[i, head] = (k @ query[head, i].double() * scaling).softmax(0) @ v
    return out.reshape(n, -1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("length", "n"), [(0, 1), (0, 5), (1, 3), (63, 4), (64, 1), (130, 11), (188, 12)])
def test_split_attention_is_attention(path, length, n):
    query, keys, values = attention_case(length, n)
    block = keys[:, length : length + n].clone(), values[:, length : length + n].clone()
    # What lies beyond the length is left over from a rejected draft, and loud.
    keys[:, length:], values[:, length:] = 50.0, 1e4
    old = PATHS[path]
    kernel = old.plan(torch.tensor([length], dtype=torch.int32), old.bucket(length, 200))
    found = split_attention(query, block, (keys, values), block_mask(n, 3, query.device), kernel, 0.25)
    keys[:, length : length + n], values[:, length : length + n] = block
    torch.testing.assert_close(found.double(), plain_attention(query, keys, values, length, 0.25), atol=1e-5, rtol=1e-5)


def test_a_length_off_by_one_is_noticed():
    """Negative control of the test above."""
    query, keys, values = attention_case(64, 3)
    block = keys[:, 64:67], values[:, 64:67]
    kernel = PlainOld().plan(torch.tensor([63], dtype=torch.int32), 200)
    found = split_attention(query, block, (keys, values), block_mask(3, 3, query.device), kernel, 0.25)
    assert (found.double() - plain_attention(query, keys, values, 64, 0.25)).abs().max() > 1e-3


def test_cuda_kernels_are_called_as_pytorch_declares_them():
    """On tensors without data: arguments and shapes only. Their values are checked where there is a GPU."""
    rows, cache = torch.empty(8, 44, 128, device="meta"), torch.empty(8, 20_000, 128, device="meta")
    length = torch.zeros(1, dtype=torch.int32, device="meta")
    for old in (FlashOld(), FrozenOld(sdpa_cudnn)):
        out, lse = old.plan(length, old.bucket(9000, 20_000))(rows, cache, cache, 0.1)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
            rows.shape,
            torch.float32,
            rows.shape[:2],
            torch.float32,
        )
    empty = FlashOld().plan(torch.zeros(1, dtype=torch.int32), 0)
    out, lse = empty(torch.ones(2, 3, 4), torch.ones(2, 9, 4), torch.ones(2, 9, 4), 0.5)
    assert (out.abs().max(), lse.max()) == (0, -torch.inf)


def test_joined_parts_are_the_whole():
    query, keys, values = attention_case(0, 4, heads=2)
    everything = torch.ones(1, dtype=torch.bool)
    whole = attend(query, keys, values, everything, 0.25)
    parts = [attend(query, keys[:, part], values[:, part], everything, 0.25) for part in (slice(0, 70), slice(70, 200))]
    empty = attend(query, keys[:, :0], values[:, :0], everything, 0.25)
    for joined in (join(*parts), join(empty, whole), join(whole, empty)):
        torch.testing.assert_close(joined, whole, atol=1e-5, rtol=1e-5)


# --- verdicts on the device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("eta", [0.0, 10.0])
def test_greedy_verdicts_are_those_of_the_slow_twin(law, eta):
    rule, kept = AcceptanceRule(law, eta), []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        n = seed % 6
        scores = torch.randn(n + 1, 7, generator=generator) * 2
        q = (scores[:-1] * 0.7 + torch.randn(n, 7, generator=generator)).softmax(-1)
        tokens, probs = q.argmax(-1), None if seed % 5 == 0 else q
        slow = rule.verify(scores, Proposal(tokens.tolist(), probs), generator, greedy=True)
        fast = verify_block(rule, scores, tokens, probs)
        assert (int(fast.num_accepted), int(fast.next_token)) == (slow.num_accepted, slow.next_token)
        assert bool(fast.valid)
        kept.append(slow.num_accepted / n if n else None)
    assert {0, 1} < set(kept)  # rejected at once, kept whole, and in between


P, Q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.6, 0.05, 0.25])
DRAWS = 4000


def device_counts(rule, uniforms, *, certain=False):
    """Emitted tokens at a drafted position, one verdict per row of uniforms [draws, 3] (the first draws the draft)."""
    scores, counts = P.log().repeat(2, 1), np.zeros(len(P))
    for row in uniforms:
        token = draw_token(Q, row[0])[None]
        verdict = verify_block(rule, scores, token, None if certain else Q[None], row[1:])
        counts[int(token) if int(verdict.num_accepted) else int(verdict.next_token)] += 1
    return counts


@pytest.mark.parametrize(("law", "eta"), [("exact", 0.0), ("transfer", 3.0), ("paper", 3.0)])
def test_sampled_verdicts_follow_the_law(law, eta):
    uniforms = torch.rand(DRAWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = device_counts(AcceptanceRule(law, eta), uniforms)
    assert total_variation(counts, closed_form(law, P.numpy(), Q.numpy(), eta, 0.1)) < tv_bound(4, DRAWS)


def test_one_uniform_for_two_purposes_is_noticed():
    """Negative control: the draw after a rejection must not reuse the uniform that rejected."""
    uniforms = torch.rand(DRAWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    uniforms[:, 2] = uniforms[:, 1]
    assert total_variation(device_counts(AcceptanceRule("exact"), uniforms), P.numpy()) > tv_bound(4, DRAWS)


def test_certain_drafts_are_lossless_on_the_device():
    uniforms = torch.rand(DRAWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counts = device_counts(AcceptanceRule("exact"), uniforms, certain=True)
    assert total_variation(counts, P.numpy()) < tv_bound(4, DRAWS)


@pytest.mark.parametrize("law", LAWS)
def test_verdicts_on_whole_blocks_are_distributed_as_the_slow_twins(law):
    """(tokens kept, token that follows) of a block of three: each sample is within the bound of the one law, so the
    two are within twice the bound of each other."""
    rule, draws = AcceptanceRule(law, 3.0), 2500
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(4, 3, generator=generator)
    q = (scores[:-1] + torch.randn(3, 3, generator=generator)).softmax(-1)
    tokens = torch.tensor([0, 2, 1])
    slow, fast = np.zeros((4, 3)), np.zeros((4, 3))
    for _ in range(draws):
        verdict = rule.verify(scores, Proposal(tokens.tolist(), q), generator, greedy=False)
        slow[verdict.num_accepted, verdict.next_token] += 1
        uniforms = torch.rand(4, dtype=torch.float64, generator=generator)
        on_device = verify_block(rule, scores, tokens, q, uniforms)
        fast[int(on_device.num_accepted), int(on_device.next_token)] += 1
    assert total_variation(fast.ravel(), slow.ravel() / draws) < 2 * tv_bound(12, draws)


def test_drawing_inverts_the_distribution():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    drawn = torch.stack([draw_token(weights, uniform) for uniform in grid])
    assert drawn.bincount(minlength=5).tolist() == [0, 300, 0, 100, 0]
    for edge in (0.0, 1 - 2**-53):
        assert weights[draw_token(weights, torch.tensor(edge, dtype=torch.float64))] > 0


def test_edges_of_sampled_verdicts():
    zero, late = torch.zeros(2, dtype=torch.float64), torch.full((2,), 0.999, dtype=torch.float64)
    # A token the target excludes is not kept, even by the uniform 0.
    scores = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    verdict = verify_block(AcceptanceRule("exact"), scores, torch.tensor([2]), torch.tensor([[0.1, 0.1, 0.8]]), zero)
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 0)
    # p = q up to rounding: a rejection has nothing left, and draws from what it accepts against.
    p = torch.tensor([[0.5, 0.5, 0.0]])
    verdict = verify_block(AcceptanceRule("exact"), torch.cat([p, p]).log(), torch.tensor([0]), p * (1 + 1e-2), late)
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 1)
    # Nothing drafted: a plain step.
    verdict = verify_block(AcceptanceRule("exact"), p.log(), torch.tensor([], dtype=torch.int64), None, late[:1])
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 1)
    assert not verify_block(AcceptanceRule(), torch.full((1, 3), torch.nan), torch.tensor([], dtype=torch.int64)).valid
    with pytest.raises(ValueError, match="1 draft tokens need 2 rows"):
        verify_block(AcceptanceRule(), torch.zeros(1, 3), torch.tensor([0]))


# --- the loop on the device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("gamma", [0, 1, 4, 10])
def test_the_device_loop_emits_what_the_decode_loop_emits(law, gamma):
    model, rule = tiny(4), AcceptanceRule(law, 10.0)
    prompt = torch.randint(64, (80,), generator=torch.Generator().manual_seed(6)).tolist()
    controller = FixedDraft("model" if gamma else None, gamma)

    target = model.new_sequence()
    target.prefill(prompt[:-1])
    drafter = ModelDrafter(model.new_sequence(), prompt[40:], ())
    drafter.start()
    rounds = list(
        decode(
            target,
            prompt,
            {"model": drafter},
            DecodeSettings(TokenWarp(), rule, controller),
            StopRule(60),
            torch.Generator(),
        )
    )

    decoder = LeanDecoder(model.model)
    runners = []
    for text in (prompt, prompt[40:]):
        runners.append(BlockRunner(decoder, decoder.new_cache(200)))
        runners[-1].run(torch.tensor(text[:-1]))
    run = gpu_loop.decode(*runners, prompt[-1], 60, rule, controller, gpu_loop.HostTimer())
    assert run.token_ids == [token for done in rounds for token in done.token_ids]
    assert (run.rounds, run.drafted, run.accepted) == (
        len(rounds), sum(r.num_drafted for r in rounds), sum(r.num_accepted for r in rounds)
    )  # fmt: skip
    assert runners[0].cache.length == target.length
    if gamma >= 4:
        assert 0 < run.accepted < run.drafted


def test_synthetic_acceptance_is_what_it_is_said_to_be():
    for per_token, rate in ((0.955, 0.783), (0.9, 0.586)):
        synthetic = gpu_loop.SyntheticAcceptance(per_token, 0)
        assert synthetic.rate(10) == pytest.approx(rate, abs=0.001)
        kept = [synthetic(10) for _ in range(4000)]
        # Hoeffding: off by more than 0.045 in fewer than one of 10^6 seeds.
        assert sum(kept) / 40_000 == pytest.approx(rate, abs=0.045)
        assert {0, 10} <= set(kept)
    assert [gpu_loop.SyntheticAcceptance(0.5, 7)(10) for _ in range(3)] == [
        gpu_loop.SyntheticAcceptance(0.5, 7)(10)
    ] * 3


# --- the benchmark ---------------------------------------------------------------------------------------------------


def test_time_boxes_keep_what_was_measured(tmp_path):
    now = [0.0]

    def rows(count, fail_at=None):
        for i in range(count):
            if i == fail_at:
                raise RuntimeError("no such kernel\nand a long story")
            now[0] += 1
            yield {"i": i}

    plan = [
        ("short", 9, rows(2)),
        ("boxed", 3, rows(9)),
        ("broken", 9, rows(5, 1)),
        ("last", 9, rows(9)),
        ("late", 9, rows(1)),
    ]
    sections = [gpu_report.Section(name, seconds, lambda r=r: r) for name, seconds, r in plan]
    report = gpu_report.Report(tmp_path / "results" / "gpu.json")
    written = []

    def log(line):
        if report.path.exists():
            written.append(len(json.loads(report.path.read_text())["sections"]))

    gpu_report.run_sections(sections, report, 10, log, clock=lambda: now[0])
    fates = {name: fate["status"] for name, fate in report.sections.items()}
    assert fates == {
        "short": "done",
        "boxed": "out of time",
        "broken": "failed",
        "last": "out of time",
        "late": "skipped",
    }
    assert report.sections["broken"]["reason"] == "RuntimeError: no such kernel"
    assert [len(report.of(name)) for name in fates] == [2, 3, 1, 4, 0]
    assert written == [1, 1, 2, 2, 3, 3, 4, 4]  # whole after each section
    assert json.loads(report.path.read_text())["sections"].keys() == fates.keys()
    assert list(report.path.parent.iterdir()) == [report.path]


def test_a_quantised_layer_that_computes_something_else_is_refused(monkeypatch):
    linear = torch.nn.Linear(256, 64, bias=False)
    bits, convert = gpu_model.quantiser("int8-fused")
    assert bits == 8
    layer = convert(linear).requires_grad_(False)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x[:1]), layer(x)[:1])  # as a sum and as a product
    wrong = torch.nn.Linear(256, 64, bias=False)
    monkeypatch.setitem(gpu_model.QUANTISED, "wrong", (8, lambda _: wrong))
    with pytest.raises(ValueError, match="more than 8 bits explain"):
        gpu_model.quantiser("wrong")[1](linear)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_to_do(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--tiny"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("see that it runs with --tiny --device cpu")


@pytest.fixture(scope="module")
def tiny_report(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "out.json"
    arguments = ["--tiny", "--device", "cpu", "--tokens", "12", "--repeats", "1", "--output", str(path)]
    assert gpu.main(arguments) == path
    return json.loads(path.read_text())


def test_the_benchmark_runs_every_section(tiny_report):
    sections, rows = tiny_report["sections"], tiny_report["rows"]
    assert {name: fate["status"] for name, fate in sections.items()} == dict.fromkeys(gpu_sections.SHARES, "done")
    assert {row["section"] for row in rows} == set(sections)
    assert sum(fate["seconds"] for fate in sections.values()) < tiny_report["conditions"]["seconds"]
    for row in rows:
        if "seconds" in row:
            assert row["times_bound"] == pytest.approx(row["seconds"] / row["bound_s"])
        elif row["section"] in ("attention", "steps", "draft", "transformers"):
            assert row.get("reason") or row.get("chosen")  # what could not be measured says why


def test_the_benchmark_measures_what_it_promises(tiny_report):
    def of(section, *keys):
        return {tuple(row.get(key) for key in keys) for row in tiny_report["rows"] if row["section"] == section}

    contexts = gpu.TINY_CONTEXTS
    assert of("steps", "context", "block", "stack") >= set(itertools.product(contexts, range(1, 12), ["eager"]))
    assert of("transformers", "context", "block") == set(itertools.product(contexts, (1, 5, 11)))
    assert {path for (path,) in of("attention", "path")} >= {"flash, length on device", "formula", "stock sdpa"}
    assert {drafter for (drafter,) in of("draft", "drafter")} == {"self", *gpu_model.QUANTISED}
    methods = {
        ("lc", None),
        ("sd", 0.955),
        ("sd", 0.9),
        ("rapid", 0.955),
        ("rapid", 0.9),
        ("auto", 0.955),
        ("auto", 0.9),
    }
    assert of("decode", "context", "method", "per_token_acceptance") == {
        (context, *case) for context, case in itertools.product(contexts, methods)
    }
    checks = [row for row in tiny_report["rows"] if row["section"] == "checks"]
    assert all(row["relative_error"] < 1e-4 and row["argmax_agreement"] == 1 for row in checks)


def test_synthetic_acceptance_is_labelled(tiny_report):
    assert tiny_report["conditions"]["acceptance"].startswith("synthetic")
    for row in tiny_report["rows"]:
        if row["section"] == "decode":
            assert row["acceptance"] == ("none: nothing is drafted" if row["method"] == "lc" else "synthetic")


def test_the_tables_are_short_and_say_what_is_synthetic(tiny_report, tmp_path):
    import io

    report = gpu_report.Report(tmp_path / "x.json", **tiny_report)
    report.sections["draft"] = {"status": "failed", "reason": "no memory"}
    out = io.StringIO()
    gpu_report.print_tables(report, out)
    assert "decode (synthetic acceptance)" in out.getvalue()
    assert "draft: failed: no memory" in out.getvalue()
