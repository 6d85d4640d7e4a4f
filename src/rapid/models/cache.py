"""A key/value cache that is allocated once, grows geometrically, hands out views and rewinds in O(1).

transformers' DynamicCache copies the whole cache at every appended token (`torch.cat`); at 8K tokens that is a
fifth of a decode step. This one writes new keys and values in place. It plugs into transformers' public `Cache`,
so any model that takes one runs on it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# Spare room of each allocation (a question and an answer of usual length go in without another one), and the factor
# by which a cache grows that nobody reserved.
HEADROOM = 512
_GROWTH = 1.5


class GrowingLayer(CacheLayerMixin):
    """One layer's keys and values, [1, kv_heads, length, head_dim], as views of a larger buffer.

    With `storage_dtype` they are kept in that dtype (half the memory in float16) and handed out in it: the
    attention function converts what it reads.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, storage_dtype: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage_dtype = storage_dtype
        self.length = 0
        self.capacity = 0
        self._reserved = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens and what usually follows, so that reading a long text allocates once."""
        if length > self.capacity:
            self._reserved = max(self._reserved, length + HEADROOM)
            if self.is_initialized:
                self._allocate(self._reserved)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        dtype = self.storage_dtype or key_states.dtype
        self.dtype, self.device = dtype, key_states.device
        self.keys = torch.empty(*key_states.shape[:-2], 0, key_states.shape[-1], dtype=dtype, device=self.device)
        self.values = torch.empty(*value_states.shape[:-2], 0, value_states.shape[-1], dtype=dtype, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append key and value states [1, kv_heads, n, head_dim]; return views of everything."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            self._allocate(max(end + HEADROOM, int(self.capacity * _GROWTH), self._reserved))
        assert self.keys is not None
        assert self.values is not None
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _allocate(self, capacity: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.keys = self._resized(self.keys, capacity)
        self.values = self._resized(self.values, capacity)
        self.capacity = capacity

    def _resized(self, buffer: torch.Tensor, capacity: int) -> torch.Tensor:
        resized = buffer.new_empty(*buffer.shape[:-2], capacity, buffer.shape[-1])
        resized[..., : self.length, :] = buffer[..., : self.length, :]
        return resized

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def rewind(self, length: int) -> None:
        """Forget all from `length` on."""
        self.length = min(self.length, length)

    def reset(self) -> None:
        self.length = 0


class GrowingCache(Cache):
    """`GrowingLayer` for each of a model's layers."""

    def __init__(self, num_layers: int, storage_dtype: torch.dtype | None = None) -> None:
        self.growing = [GrowingLayer(storage_dtype) for _ in range(num_layers)]
        super().__init__(layers=list(self.growing))

    def reserve(self, length: int) -> None:
        """Room for `length` tokens in every layer. One layer is copied after the other: while a cache grows it takes
        at most its new size and one old layer."""
        for layer in self.growing:
            layer.reserve(length)

    def read(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of every layer's first `length` keys and values."""
        return [
            (layer.keys[..., :length, :], layer.values[..., :length, :])
            for layer in self.growing
            if layer.keys is not None and layer.values is not None
        ]

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens: O(1) in the cache's size."""
        for layer in self.growing:
            layer.rewind(length)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        tensors = [t for layer in self.growing for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)
