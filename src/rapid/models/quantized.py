"""A smaller copy of a model's weights for drafting: linear layers in 8 or 4 bits, everything else shared.

Weight-only: a layer's weights are turned back into the model's dtype where they are multiplied, activations are not
rounded, so a row of a block comes out as it would alone. Round to nearest: 8 bits symmetric with a scale for each
output, 4 bits with a scale and a minimum for each group of 32 inputs, 5 bits in all in a 16-bit dtype. (GGUF's Q4_1 is
the same grid, and Q4_0 and Q4_K are close to it: of a layer loaded from such a file, 4 bits lose next to nothing.)
Where memory bandwidth is what a step costs, `torch.compile` fuses `dequantize` into the product and fewer bytes are
streamed; on a CPU in eager mode a step is slower than in float32.

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

GROUP = 32


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose weights [outputs, inputs] are kept in 8 or 4 bits.

    packed   8 bits: int8 [outputs, inputs]; 4 bits: uint8 [outputs, inputs / 2], two to a byte, low half first.
    scale    [outputs, groups, 1] in the dtype of the original.
    minimum  the same, of 4 bits only: the weight of level 0.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, bits: int) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.bits = bits
        self.shape = weight.shape
        # A width that groups do not divide gets one scale for each output.
        groups = weight.shape[1] // GROUP if bits == 4 and weight.shape[1] % GROUP == 0 else 1
        grouped = weight.float().view(weight.shape[0], groups, -1)
        if bits == 8:
            scale = _kept(grouped.abs().amax(-1, keepdim=True) / 127, weight.dtype)
            levels = (grouped / scale).round().clamp(-127, 127).to(torch.int8).view(weight.shape)
        else:
            minimum = grouped.amin(-1, keepdim=True).to(weight.dtype).float()
            scale = _kept((grouped.amax(-1, keepdim=True) - minimum) / 15, weight.dtype)
            levels = ((grouped - minimum) / scale).round().clamp(0, 15).to(torch.uint8).view(weight.shape)
            levels = levels[:, 0::2] | (levels[:, 1::2] << 4)
            self.register_buffer("minimum", minimum.to(weight.dtype))
        self.register_buffer("packed", levels)
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = linear.bias

    def dequantize(self) -> torch.Tensor:
        """The weights [outputs, inputs] as they are multiplied."""
        if self.bits == 8:
            return self.packed.to(self.scale.dtype) * self.scale[:, 0]
        levels = torch.stack([self.packed & 15, self.packed >> 4], dim=-1)
        grouped = levels.view(self.shape[0], self.scale.shape[1], -1).to(self.scale.dtype)
        return (grouped * self.scale + self.minimum).view(self.shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.dequantize(), self.bias)


def _kept(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as `dtype` can hold them, above zero: levels are counted with what they will be multiplied with."""
    return scale.to(dtype).float().clamp_min(1e-12)


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
