"""Quantised copies for drafting: close to the original, much smaller, one set of everything else."""

import pytest
import torch

import rapid
from rapid.errors import InvalidParameter, ModelError
from rapid.models.quantized import QuantizedLinear, quantize
from rapid.models.toy import tiny
from rapid.params import drafter_bits


def stored(model: torch.nn.Module, other: torch.nn.Module | None = None) -> int:
    """Bytes of the tensors of a model that are not also the other one's."""
    shared = {t.data_ptr() for t in (*other.parameters(), *other.buffers())} if other else set()
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers()) if t.data_ptr() not in shared}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize(("outputs", "inputs"), [(8, 128), (5, 64), (7, 30), (1, 2)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_the_rounded_one(outputs, inputs, bits, bias):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    linear.weight.copy_(torch.randn(outputs, inputs, generator=generator))
    layer = QuantizedLinear(linear, bits)
    group = 32 if bits == 4 and inputs % 32 == 0 else inputs
    grouped = linear.weight.view(outputs, -1, group)
    if bits == 8:
        lowest, steps = torch.zeros(outputs, 1, 1), grouped.abs().amax(-1, keepdim=True) / 127
    else:
        lowest = grouped.amin(-1, keepdim=True)
        steps = (grouped.amax(-1, keepdim=True) - lowest) / 15
    error = (layer.dequantize() - linear.weight).view(outputs, -1, group).abs()
    assert (error <= steps / 2 * 1.001 + 1e-6).all()
    # A slow twin: every weight by itself.
    rounded = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            low, step = float(lowest[o, i // group]), float(steps[o, i // group])
            rounded[o, i] = low + round((float(linear.weight[o, i]) - low) / step) * step
    torch.testing.assert_close(layer.dequantize(), rounded, atol=1e-5, rtol=1e-5)
    block = torch.randn(3, inputs, generator=generator)
    expected = torch.nn.functional.linear(block, rounded, linear.bias)
    torch.testing.assert_close(layer(block), expected, atol=1e-4, rtol=1e-4)


def test_what_is_on_the_grid_already_stays():
    """As the weights of a model from a Q4_1 GGUF file are."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 8).requires_grad_(False)
    levels = torch.randint(16, (8, 2, 32), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, 15
    linear.weight.copy_((levels * 0.125 - 0.75).view(8, 64))
    assert torch.equal(QuantizedLinear(linear, 4).dequantize(), linear.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    linear = torch.nn.Linear(64, 8).requires_grad_(False).to(dtype)
    for bits, most in ((8, 0.02), (4, 0.1)):
        layer = QuantizedLinear(linear, bits)
        assert layer.scale.dtype == layer.dequantize().dtype == dtype
        assert (layer.dequantize() - linear.weight).float().abs().max() < most * linear.weight.float().abs().max()


def test_a_row_of_zeros_stays_zero():
    linear = torch.nn.Linear(64, 2).requires_grad_(False)
    linear.weight[0] = 0
    for bits in (8, 4):
        assert not QuantizedLinear(linear, bits).dequantize()[0].any()


@pytest.mark.parametrize(("bits", "share"), [(8, 0.3), (4, 0.3)])
def test_the_copy_is_smaller_and_shares_the_rest(bits, share):
    model = tiny(0).model
    before = {name: p.clone() for name, p in model.named_parameters()}
    smaller = quantize(model, bits)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert stored(smaller, model) <= share * sum(m.weight.numel() * 4 for m in linears)
    assert smaller.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert smaller.model.norm.weight is model.model.norm.weight
    assert not any(isinstance(m, torch.nn.Linear) for m in smaller.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_more_bits_are_closer():
    model = tiny(0).model
    ids = torch.randint(64, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.log_softmax(-1)
        kl = {
            bits: float(
                (expected.exp() * (expected - quantize(model, bits)(input_ids=ids).logits.log_softmax(-1)))
                .sum(-1)
                .mean()
            )
            for bits in (8, 4)
        }
    assert 0 < kl[8] < 0.05 * kl[4]


@pytest.mark.parametrize(("name", "bits"), [("self:8bit", 8), ("self:4bit", 4), ("self", None), ("embedded", None)])
def test_names(name, bits):
    assert drafter_bits(name) == bits


@pytest.mark.parametrize("name", ["self:3bit", "self:", "self:int8"])
def test_unknown_names_are_refused(name):
    with pytest.raises(InvalidParameter, match="use self, self:8bit, self:4bit, or a model"):
        rapid.Engine.load("embedded", name)


def test_odd_widths_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(ModelError, match="use self:8bit"):
        quantize(model, 4)


DOCUMENT = rapid.Document("\n\n".join(f"Room {i}: the key of room {i} hangs on nail {1000 - i}." for i in range(20)))


@pytest.mark.parametrize("drafter", ["self:8bit", "self:4bit"])
class TestEngine:
    @pytest.fixture
    def engine(self, tiny_model_dir, drafter):
        return rapid.Engine.load(tiny_model_dir, drafter)

    def ask(self, engine, method, gamma=4, **options):
        session = engine.open(DOCUMENT, retrieval=rapid.Retrieval("bm25", chunk_tokens=64), reserve_tokens=300)
        speculation = rapid.Speculation(method, num_draft_tokens=gamma, **options)
        return session.ask(
            "Where is the key of room 7?", speculation=speculation, sampling=rapid.Sampling(max_new_tokens=40)
        )

    def test_it_drafts_and_the_target_decides(self, engine, tiny_engine, drafter):
        expected = self.ask(tiny_engine, "lc").token_ids
        for method in ("sd", "sd-full"):
            for gamma in (1, 4, "auto"):
                found = self.ask(engine, method, gamma)
                assert found.token_ids == expected
                assert found.settings["drafter"] == drafter
        assert found.warnings == []
        # A random model is sure of nothing, so small changes move many of its choices.
        assert self.ask(engine, "sd-full").stats.acceptance_rate > (0.5 if drafter == "self:8bit" else 0.05)

    def test_a_transfer_is_warned_about(self, engine, drafter):
        found = self.ask(engine, "rapid")
        assert found.settings["eta"] == 10
        assert any("quantised copy" in warning for warning in found.warnings)
        assert self.ask(engine, "rapid", eta=0.0).warnings == []

    def test_a_step_reads_less(self, engine, drafter):
        backend = engine.backend
        assert backend.drafter_model.step_bytes(0) < backend.target_model.step_bytes(0) / 2
        assert backend.drafter.num_parameters < backend.target.num_parameters
        assert backend.vocabulary_difference is None

    def test_a_device_of_its_own_is_refused(self, tiny_model_dir, drafter):
        with pytest.raises(InvalidParameter, match=f"drafter {drafter} is where and what the target is"):
            rapid.Engine.load(tiny_model_dir, drafter, drafter_dtype="bfloat16")
