"""Attention of a short block over a long cache, as two parts joined by their log-sum-exp.

    old    all rows over what was cached before the block. No mask is needed, so a kernel may split the cache over
           the whole device: flash-decoding, with a query of several tokens.
    block  causal attention of the block's n tokens among themselves: tiny.

    join   softmax over both: w = sigmoid(lse_old - lse_block), out = w out_old + (1 - w) out_block.

The query heads of one key/value head and the n tokens become the rows of one query: row g * n + i is token i under
query head g of the group. Each key and value is then read once, however many tokens are verified.

How the old part is computed is an `OldAttention`; which one is fastest is for a measurement to say
(`benchmarks/gpu.py`). All of them run inside a captured graph, where the length is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# An attention's output [kv_heads, rows, head_dim] and the log-sum-exp of its scores [kv_heads, rows], in float32.
Part = tuple[torch.Tensor, torch.Tensor]
# (rows [kv_heads, rows, d], keys and values [kv_heads, length, d], scaling) -> Part
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Part]

# Capacities that graphs are captured for: multiples of 1024 tokens, or of a sixteenth of the next power of two. Kernels
# split what a capacity holds, so one far above the length would leave much of the device idle.
LEAST_CAPACITY_STEP = 1024
# Tokens by which a frozen prefix grows: each step captures anew, and on average half of it is read by the slow path.
FROZEN_STEP = 512


class OldAttention(Protocol):
    """A way to attend to the first `length` keys of a cache."""

    def bucket(self, length: int, capacity: int) -> int:
        """What is fixed at capture: a graph captured for this number serves every length that has it."""
        ...

    def plan(self, length: torch.Tensor, bucket: int) -> Kernel:
        """The kernel over whole caches [kv_heads, capacity, d], of which `length` (int32 [1]) keys count; made once
        per forward pass, for all layers."""
        ...


def split_attention(
    query: torch.Tensor,
    block: tuple[torch.Tensor, torch.Tensor],
    cached: tuple[torch.Tensor, torch.Tensor],
    visible: torch.Tensor,
    attend_old: Kernel,
    scaling: float,
    blend: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Causal attention of n tokens that follow what is cached.

    query [heads, n, d]; keys and values of the block [kv_heads, n, d] and of the cache [kv_heads, capacity, d];
    `visible` from `block_mask`; `blend` may be a compiled `blend_block`.
    Returns [n, heads * d] in the query's dtype.
    """
    heads, n, head_dim = query.shape
    rows = query.reshape(block[0].shape[0], -1, head_dim)
    out = (blend or blend_block)(attend_old(rows, *cached, scaling), rows, *block, visible, scaling)
    return out.view(heads, n, head_dim).transpose(0, 1).reshape(n, heads * head_dim)


def block_mask(num_tokens: int, group: int, device: torch.device) -> torch.Tensor:
    """Which of a block's n keys each of its rows sees, bool [group * n, n]; `group`: query heads per key/value head."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril().repeat(group, 1)


def blend_block(
    old: Part, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The old part joined with the block's own, [kv_heads, rows, d] in the dtype of `rows`."""
    return join(old, attend(rows, keys, values, visible, scaling))[0].to(rows.dtype)


def join(first: Part, second: Part) -> Part:
    """The attention over the keys of both parts."""
    (first_out, first_lse), (second_out, second_lse) = first, second
    weight = torch.sigmoid(first_lse - second_lse)[..., None]
    return torch.lerp(second_out, first_out, weight), torch.logaddexp(first_lse, second_lse)


def attend(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scaling: float) -> Part:
    """The formula, in float32. Where no key is visible the output is 0 and the log-sum-exp -inf."""
    scores = (rows.float() @ keys.float().mT * scaling).masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~visible, 0.0)
    return weights @ values.float(), lse


class PlainOld:
    """The formula with a mask: the slow twin of all others, and what a CPU uses."""

    def bucket(self, length: int, capacity: int) -> int:
        return capacity_bucket(length, capacity)

    def plan(self, length: torch.Tensor, bucket: int) -> Kernel:
        visible = torch.arange(bucket, device=length.device) < length

        def kernel(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Part:
            return attend(rows, keys[:, :bucket], values[:, :bucket], visible, scaling)

        return kernel


class FlashOld:
    """PyTorch's FlashAttention-2 with the number of keys read from the device (CUDA only).

    Given one query token it folds the heads of a group into rows of its tile and splits the keys over the device;
    the block's tokens come in as further heads of the group. One graph serves all lengths of a capacity bucket.
    """

    def bucket(self, length: int, capacity: int) -> int:
        return capacity_bucket(length, capacity)

    def plan(self, length: torch.Tensor, bucket: int) -> Kernel:
        if bucket == 0:  # for no keys at all the library's log-sum-exp is +inf
            return PlainOld().plan(length, 0)
        starts = torch.arange(2, dtype=torch.int32, device=length.device)
        ends = starts * bucket

        def kernel(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Part:
            kv_heads, num_rows, head_dim = rows.shape
            query = rows.reshape(1, kv_heads * num_rows, head_dim)
            key, value = keys[:, :bucket].transpose(0, 1), values[:, :bucket].transpose(0, 1)
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                query, key, value, starts, ends, 1, bucket, 0.0, False, False, scale=scaling, seqused_k=length
            )
            return out.view(rows.shape).float(), lse.reshape(kv_heads, num_rows)

        return kernel


@dataclass(frozen=True)
class FrozenOld:
    """Any kernel over a prefix whose length is fixed at capture, and the formula over the few keys after it."""

    kernel: Kernel
    step: int = FROZEN_STEP

    def bucket(self, length: int, capacity: int) -> int:
        return length // self.step * self.step

    def plan(self, length: torch.Tensor, bucket: int) -> Kernel:
        rest = slice(bucket, bucket + self.step)

        def kernel(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Part:
            last = keys[:, rest]
            visible = torch.arange(bucket, bucket + last.shape[1], device=length.device) < length
            rest_part = attend(rows, last, values[:, rest], visible, scaling)
            if bucket == 0:
                return rest_part
            return join(self.kernel(rows, keys[:, :bucket], values[:, :bucket], scaling), rest_part)

        return kernel


def capacity_bucket(length: int, capacity: int) -> int:
    """The part of a cache of `capacity` that a graph for `length` tokens reads: at least `length`, 0 for none, and
    beyond 16K tokens at most an eighth more."""
    if length == 0:
        return 0
    step = max(LEAST_CAPACITY_STEP, (1 << (length - 1).bit_length()) // 16)
    return min(-(-length // step) * step, capacity)


def sdpa_flash(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Part:
    """FlashAttention-2 on CUDA; PyTorch's own tiled kernel on a CPU."""
    name = "_scaled_dot_product_flash_attention" + ("" if rows.is_cuda else "_for_cpu")
    out, lse, *_ = getattr(torch.ops.aten, name)(rows[None], keys[None], values[None], scale=scaling)
    return _part(rows, out, lse)


def sdpa_cudnn(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Part:
    """cuDNN's attention (CUDA only)."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        rows[None], keys[None], values[None], None, True, scale=scaling
    )
    return _part(rows, out, lse)


class Flex:
    """FlexAttention, compiled on first use; short queries take its split-KV decoding kernel (CUDA only)."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self._compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def __call__(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Part:
        out, lse = self._compiled(rows[None], keys[None], values[None], scale=scaling, return_lse=True)
        return _part(rows, out, lse)


def _part(rows: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Part:
    kv_heads, num_rows, _ = rows.shape
    # Kernels pad the rows of the log-sum-exp, or give it a last dimension of 1.
    return out[0].float(), lse.reshape(kv_heads, -1)[:, :num_rows].float()
