"""The model that is measured: the shape of Llama-3.1-8B, random weights made on the device, nothing downloaded.

And weight-only quantised linear layers for its drafter, each checked against the product it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rapid.models.quantized import QuantizedLinear

# Llama-3.1-8B's config: 32 layers, 8.03e9 parameters.
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072 + 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
# The same kind of model in the size of a test.
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
INT4_GROUP = 128
# What rounding normal weights costs a product, relative to its norm: about 0.01 and 0.11. A wrong kernel: above 1.
ROUNDING = {8: 0.03, 4: 0.2}
_INT4_INNER_TILES = 8


def random_llama(sizes: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A transformers Llama with weights drawn on `device`; its parameters are never on the host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.fill_(1)
        else:
            weight.data.normal_(0, 0.02, generator=generator)
    # Its buffers are computed from the config, not stored: made anew where they will be read.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval().requires_grad_(False)


class Fused(QuantizedLinear):
    """The product's quantised layer with the products of a draft step as sums, which torch.compile fuses with the
    dequantisation: packed weights are then all that is read."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 2:
            return super().forward(inputs)
        return (inputs.float()[:, None] * self.dequantize()).sum(-1).to(inputs.dtype)


class Int8Packed(QuantizedLinear):
    """The 8-bit layer through PyTorch's own int8 weight-only product."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(inputs, self.packed, self.scale.flatten())


class Int4Packed(nn.Module):
    """Weights of 4 bits in groups of 128, through PyTorch's tinygemm product (CUDA, bfloat16)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        groups = linear.weight.float().view(outputs, inputs // INT4_GROUP, INT4_GROUP)
        scale = groups.abs().amax(-1, keepdim=True) / 7
        levels = (groups / scale).round().clamp(-8, 7)
        codes = (levels + 8).to(torch.uint8).view(outputs, inputs)
        packed = (codes[:, ::2] << 4) | codes[:, 1::2]
        self.packed = torch._convert_weight_to_int4pack(packed.contiguous(), _INT4_INNER_TILES)
        scale = scale[..., 0].T.to(linear.weight.dtype)
        self.scales_and_zeros = torch.stack((scale, torch.zeros_like(scale)), dim=-1).contiguous()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm(inputs, self.packed, INT4_GROUP, self.scales_and_zeros)


def torchao_int4(linear: nn.Linear) -> nn.Module:
    """torchao's 4-bit weight-only layer."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    layer = nn.Sequential(deepcopy(linear))
    quantize_(layer, Int4WeightOnlyConfig(group_size=INT4_GROUP))
    return layer


# Drafter -> bits of a weight, and what makes its linear layers.
QUANTISED: dict[str, tuple[int, Callable[[nn.Linear], nn.Module]]] = {
    "int8-fused": (8, partial(Fused, bits=8)),
    "int4-fused": (4, partial(Fused, bits=4)),
    "int4-packed": (4, Int4Packed),
    "int8-packed": (8, partial(Int8Packed, bits=8)),
    "int4-torchao": (4, torchao_int4),
}


def quantiser(name: str) -> tuple[int, Callable[[nn.Linear], nn.Module]]:
    """Bits of a weight, and what makes a layer: each is checked on random input against the weights it stands for.
    A kernel that computes something else raises `ValueError` instead of looking fast."""
    bits, make = QUANTISED[name]

    @torch.no_grad()
    def convert(linear: nn.Linear) -> nn.Module:
        layer = make(linear)
        x = torch.randn(1, linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)
        expected = F.linear(x, linear.weight).float()
        error = float((layer(x).float() - expected).norm() / expected.norm())
        if not error < ROUNDING[bits]:
            raise ValueError(f"{name} is off by {error:.3f} of the product's norm, more than {bits} bits explain")
        return layer

    return bits, convert
