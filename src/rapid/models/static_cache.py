"""A key/value cache of fixed size whose length also lives on the device.

A CUDA graph replays with the addresses and shapes it was captured with, so nothing may be allocated and no shape may
follow the length. Here the buffers never move, and kernels read the length from a tensor. The host keeps the same
number for choosing buckets; it is set, never read back, so neither appending nor rewinding waits for the device.
"""

from __future__ import annotations

import torch


class StaticCache:
    """Keys and values [kv_heads, capacity, head_dim] of every layer.

    length         tokens held, on the host.
    device_length  the same, int32 [1] on the device.

    Buffers start as zeros: what lies beyond the length is masked, and a mask does not hide NaN.
    """

    def __init__(
        self, num_layers: int, kv_heads: int, head_dim: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (kv_heads, capacity, head_dim)
        self.capacity = capacity
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.length = 0
        self.device_length = torch.zeros(1, dtype=torch.int32, device=device)

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Positions [num_tokens] of the next tokens, int64, computed on the device."""
        offsets = torch.arange(num_tokens, device=self.device_length.device)
        return self.device_length + offsets

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [kv_heads, n, head_dim] at `positions` [n]. They count once `advance` says so."""
        self.keys[layer].index_copy_(1, positions, keys)
        self.values[layer].index_copy_(1, positions, values)

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens, which have been written."""
        self._set(self.length + num_tokens)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens: O(1), without waiting for the device."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        self._set(length)

    def _set(self, length: int) -> None:
        if length > self.capacity:
            raise ValueError(f"{length} tokens do not fit a cache of {self.capacity}")
        self.length = length
        self.device_length.fill_(length)
