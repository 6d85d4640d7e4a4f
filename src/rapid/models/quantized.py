"""A smaller copy of a model's weights for drafting: linear layers in 8 or 4 bits, everything else shared.

Weight-only: a layer's weights are turned back into the model's dtype where they are multiplied, activations are not
rounded, so a row of a block comes out as it would alone. Symmetric, round to nearest: 8 bits with a scale for each
output, 4 bits with one for each group of 64 inputs. Where memory bandwidth is what a step costs, `torch.compile` fuses
`dequantize` into the product and fewer bytes are streamed; on a CPU in eager mode a step is slower than in float32.

A target never runs on such a copy: it drafts, and the target decides.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rapid.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP = 64


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose weights [outputs, inputs] are kept in 8 or 4 bits.

    packed  8 bits: int8 [outputs, inputs]; 4 bits: uint8 [outputs, inputs / 2], two to a byte, low half first.
    scale   [outputs, groups, 1] in the dtype of the original.
    """

    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, bits: int) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.bits = bits
        self.shape = weight.shape
        # A width that groups do not divide gets one scale for each output.
        groups = weight.shape[1] // GROUP if bits == 4 and weight.shape[1] % GROUP == 0 else 1
        grouped = weight.float().view(weight.shape[0], groups, -1)
        most = 2 ** (bits - 1) - 1
        scale = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
        levels = (grouped / scale).round().clamp(-most, most).to(torch.int8).view(weight.shape)
        if bits == 4:
            levels = (levels + 8).to(torch.uint8)
            levels = levels[:, 0::2] | (levels[:, 1::2] << 4)
        self.register_buffer("packed", levels)
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = linear.bias

    def dequantize(self) -> torch.Tensor:
        """The weights [outputs, inputs] as they are multiplied."""
        levels = self.packed
        if self.bits == 4:
            halves = torch.stack([levels & 15, levels >> 4], dim=-1)
            levels = halves.view(self.shape).to(torch.int8) - 8
        grouped = levels.view(self.shape[0], self.scale.shape[1], -1).to(self.scale.dtype)
        return (grouped * self.scale).view(self.shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.dequantize(), self.bias)


def quantize(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """A copy of `model` with its linear layers in `bits` bits, which shares all other parameters (embeddings, norms,
    biases) with it. Raises `ModelError` where a layer cannot be packed."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    smaller = copy.deepcopy(model, shared)
    for name, module in list(smaller.named_modules()):
        if isinstance(module, torch.nn.Linear):
            if bits == 4 and module.in_features % 2:
                raise ModelError(f"layer {name} has an odd width, which 4 bits cannot pack; use self:8bit")
            smaller.set_submodule(name, QuantizedLinear(module, bits))
    return smaller
