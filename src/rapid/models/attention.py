"""Attention for one sequence over a long cache: grouped query heads, no copied keys or values, no mask tensor.

Registered under the name `rapid` in transformers' attention and mask registries, and selected with
`model.set_attn_implementation("rapid")`. It serves batches of one unpadded sequence, which is all the decode loop
makes; where something else arrives (a softcap, attention sinks, a padded batch) it says so instead of being wrong.

Why: with grouped-query attention the stock CPU path repeats every key and value head for each query head and,
for a block of several query tokens, builds a mask: a verify of 5 tokens at 8K tokens then costs three decode
steps. Here the query heads that share a key/value head form one matrix product with it, and the causal mask
touches only the last n columns. PyTorch's CPU kernel gives each key/value head to one thread: three heads on two
threads leave a quarter of the machine idle, two heads on sixteen nearly all of it. A long cache is therefore cut into
as many equal parts as occupy all threads, joined by their log-sum-exp (flash-decoding). Where no cut is needed, a
block takes plain matrix products: the kernel reads the cache once per 32 rows and multiplies at a third of their rate.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION_NAME = "rapid"

# Blocks of at most this many query tokens take the grouped product; longer ones (prefill) take PyTorch's tiled
# kernel, whose memory does not grow with block x cache.
MAX_GROUPED_BLOCK = 32

# Caches shorter than this are not cut: joining costs more than idle threads. Nor is a part shorter than the second.
_LEAST_SPLIT_CACHE = 1536
_LEAST_PART = 512

# Most scores held at once (32 MB): blocks with more of them take the fused kernel, which holds none.
_MOST_SCORES = 8 * 2**20

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def grouped_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the last n positions over the whole cache.

    query [1, heads, n, d]; key, value [1, kv_heads, length, d], the block's own n tokens last.
    Returns [1, n, heads, d] in the query's dtype. The query heads of one key/value head become rows of one query, so
    that the fused kernel streams each key and value once, in the dtype they are stored in.
    """
    _, heads, n, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    rows = query.reshape(1, kv_heads, heads // kv_heads * n, head_dim).to(key.dtype)
    parts = num_parts(kv_heads, length) if query.is_cpu and length >= _LEAST_SPLIT_CACHE else 1
    if parts > 1 and key.shape[-1] == value.shape[-1]:
        out = split_cache_attention(rows, key, value, n, scaling, parts)
        return out.to(query.dtype).view(1, heads, n, head_dim).transpose(1, 2)
    few = heads * n * length <= _MOST_SCORES
    if few and n > 1 and heads > kv_heads and query.is_cpu and key.dtype == torch.float32:
        out = product_attention(rows, key, value, n, scaling)
        return out.to(query.dtype).view(1, heads, n, value.shape[-1]).transpose(1, 2)
    mask = None
    if n > 1:
        mask = torch.ones(n, length, dtype=torch.bool, device=query.device).tril_(length - n)
        mask = mask.repeat(heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.to(query.dtype).view(1, heads, n, value.shape[-1]).transpose(1, 2)


def split_cache_attention(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n: int, scaling: float, parts: int
) -> torch.Tensor:
    """The same on a CPU for a long cache, cut into `parts` of equal length.

    rows [1, kv_heads, group * n, d], row g * n + i being token i under query head g of the group; key, value
    [1, kv_heads, length, d], all of one dtype. Returns [kv_heads, group * n, d].
    """
    _, kv_heads, length, head_dim = key.shape
    part, step = _cut(length, parts)
    keys, values = (
        x.as_strided((parts, kv_heads, part, head_dim), (step * x.stride(2), *x.stride()[1:])) for x in (key, value)
    )
    mask = _parts_mask(n, rows.shape[2] // n, length, parts, rows.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows.expand(parts, -1, -1, -1), keys, values, attn_mask=mask, scale=scaling
    )
    joined: torch.Tensor = (out * lse.softmax(0)[..., None]).sum(0)
    return joined


def product_attention(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n: int, scaling: float
) -> torch.Tensor:
    """The same by two matrix products, all scores held at once. Arguments and result as in `split_cache_attention`."""
    scores = torch.bmm(rows[0] * scaling, key[0].transpose(1, 2))
    later = torch.full((n, n), -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    scores.unflatten(1, (-1, n))[..., -n:] += later
    return torch.bmm(scores.softmax(-1), value[0])


def num_parts(kv_heads: int, length: int, threads: int | None = None) -> int:
    """Into how many parts a cache is cut: the fewest that give all threads equal work, but none that is too short."""
    threads = threads or torch.get_num_threads()
    return max(1, min(threads // math.gcd(threads, kv_heads), length // _LEAST_PART))


def _cut(length: int, parts: int) -> tuple[int, int]:
    """Length of a part and the distance of their beginnings: equal parts that cover exactly `length` keys. Where it
    cannot be divided they overlap by a few."""
    part = -(-length // parts)
    part += (length - part) % (parts - 1)
    return part, (length - part) // (parts - 1)


@lru_cache(maxsize=2)  # all layers of a forward pass share it; for long caches it is megabytes
def _parts_mask(n: int, group: int, length: int, parts: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores of each part [parts, 1, group * n, part]: -inf where a key comes after the token
    or belongs to the part before as well; None where nothing has to be hidden."""
    part, step = _cut(length, parts)
    if n == 1 and part == step:
        return None
    mask = torch.zeros(parts, 1, group, n, part, dtype=dtype)
    mask[1:, ..., : part - step] = -torch.inf
    mask[-1, ..., -n:] = torch.full((n, n), -torch.inf, dtype=dtype).triu(1)
    return mask.flatten(2, 3)


def tiled_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """The same for long blocks, by PyTorch's fused kernel. Shapes as in `grouped_attention`."""
    n, length = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    k, v = key.to(query.dtype), value.to(query.dtype)
    if query.is_cuda and n != length and group > 1:
        # CUDA's fused kernels take a mask or grouped heads, not both; the plain one would hold all scores at once.
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        group = 1
    mask = None
    if n != length:
        mask = torch.ones(n, length, dtype=torch.bool, device=query.device).tril_(length - n)
    out = F.scaled_dot_product_attention(
        query, k, v, attn_mask=mask, is_causal=mask is None and n > 1, scale=scaling, enable_gqa=group > 1
    )
    return out.transpose(1, 2)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError("the `rapid` attention serves one unpadded sequence at a time")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"the `rapid` attention does not support `{name}`")
    # A sliding window as wide as the text hides nothing.
    if (sliding := kwargs.get("sliding_window")) is not None and key.shape[2] > sliding:
        raise ValueError(f"the `rapid` attention does not support a `sliding_window` of {sliding} tokens")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = grouped_attention if query.shape[2] <= MAX_GROUPED_BLOCK else tiled_attention
    return attend(query, key, value, scaling), None


def _no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask is implied: causal, one sequence. A padding mask is passed on, to be refused by the forward."""
    if attention_mask is not None and not bool(attention_mask.all()):
        return attention_mask
    return None


def register() -> None:
    """Make the name known to transformers; safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
