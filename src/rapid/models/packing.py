"""Linear layers with weights packed to float16 on a CPU: half the memory traffic, activations and sums in float32.

MKL's float32 products are slow between 2 and 16 rows, which is what a verify block has; FBGEMM's packed ones are not.
What it changes of the numbers is measured in docs/adr/0002-packed-linears.md.
"""

from __future__ import annotations

import warnings

import torch


def can_pack(device: torch.device) -> bool:
    """Whether this PyTorch has the packed products for `device`."""
    return device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines


def pack_linears(model: torch.nn.Module) -> None:
    """Replace the linear layers of a float32 CPU model, in place."""
    with warnings.catch_warnings():
        # torch.ao announces a move to another package; the call itself is what that package keeps.
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.float16, inplace=True)
