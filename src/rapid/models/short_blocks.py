"""The forward pass of a Llama-shaped model for a few tokens on a CPU: what decoding and verifying consist of.

transformers' forward launches some 70 small operations a layer, and PyTorch's float32 products are slow between 4 and
some 30 rows, which is what a verify block has: MKL then packs the whole weight anew in each call. This pass has half
the operations, and keeps a copy of the weights in the blocked layout of oneDNN, with which 5 rows cost hardly more
than one. From how many rows on the copy is used is measured, since processors differ: on Intel's one row is faster
from the plain weights, on AMD's it takes them 1.6 times as long. Sums are float32 in both; logits agree with
transformers' up to rounding. Long blocks (prefill) stay with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from rapid.models.attention import MAX_GROUPED_BLOCK, grouped_attention
from rapid.models.cache import GrowingCache
from rapid.models.lean import Layer, finish, project, rms_norm, why_unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows from which blocked weights are faster on every processor seen, and the rows they are laid out for. With AVX-512,
# MKL may read a weight once for up to 3 rows.
_LEAST_ROWS = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2
_TYPICAL_ROWS = 8

# Bytes of weights that fewer rows are timed on: more than caches hold, as in a decode step. Smaller models are not.
_TIMED_BYTES = 64 * 2**20
_TIMINGS = 5
# How much faster blocked weights must be for fewer rows: noise must not decide, for the two round differently.
_CLEARLY = 1.2


class Product:
    """The outputs of linear layers of one input, side by side: x [n, in] -> [n, sum of out]."""

    def __init__(self, *linears: Any) -> None:
        self.linears = linears
        self.blocked: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.least_rows = _LEAST_ROWS

    def keep_blocked(self) -> None:
        """Keep a second copy of float32 weights, joined and in the blocked layout."""
        plain = [linear for linear in self.linears if isinstance(linear, nn.Linear)]
        weights = [linear.weight.detach() for linear in plain if linear.weight.dtype == torch.float32]
        if len(weights) < len(self.linears):
            return  # quantised layers have products of their own
        biases = [linear.bias.detach() for linear in plain if linear.bias is not None]
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), _TYPICAL_ROWS)
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.from_blocked(x) if self.blocked is not None and len(x) >= self.least_rows else self.from_plain(x)

    def from_blocked(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return out

    def from_plain(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = [linear(x) for linear in self.linears]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class ShortBlocks:
    """Runs blocks of at most `max_tokens` over the modules and weights of a transformers model on a CPU.

    blocked  keep the second copy of float32 weights. Where PyTorch has no products for it, none is kept.
    """

    max_tokens = MAX_GROUPED_BLOCK

    def __init__(self, model: PreTrainedModel, *, blocked: bool) -> None:
        config = model.config.get_text_config(decoder=True)
        body: Any = model.model
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.num_heads)
        self.eps = float(config.rms_norm_eps)
        self.embed = body.embed_tokens
        self.rotary = body.rotary_emb
        self.norm: torch.Tensor = body.norm.weight
        self.layers = [_read_layer(layer) for layer in body.layers]
        self.head = Product(model.get_output_embeddings())
        if blocked and has_blocked_products():
            products: list[Any] = [p for x in self.layers for p in (x.qkv, x.out, x.gate_up, x.down)]  # any callables
            products.append(self.head)
            for product in products:
                product.keep_blocked()
            least_rows = least_blocked_rows(products)
            for product in products:
                product.least_rows = least_rows

    def run(self, ids: torch.Tensor, cache: GrowingCache, first_position: int, logits_to_keep: int) -> torch.Tensor:
        """Logits [logits_to_keep (0: n), rows of the head] of ids [n], the first of them at `first_position`, after
        what `cache` holds; their keys and values are appended to it."""
        n = len(ids)
        x = self.embed(ids)
        positions = torch.arange(first_position, first_position + n)
        cos, sin = (table[0, :, None] for table in self.rotary(x, positions[None]))
        for layer, cached in zip(self.layers, cache.growing, strict=True):
            query, keys, values = project(
                x, layer.attention_norm, self.eps, layer.qkv, cos, sin, self.num_heads, self.num_kv_heads
            )
            all_keys, all_values = cached.update(keys[None], values[None])
            attended = grouped_attention(query[None], all_keys, all_values, self.head_dim**-0.5)
            x = finish(x, attended.reshape(n, -1), layer.out, layer.mlp_norm, self.eps, layer.gate_up, layer.down)
        logits: torch.Tensor = self.head(rms_norm(x[-logits_to_keep:], self.norm, self.eps))
        return logits


def supports(model: PreTrainedModel) -> bool:
    """Whether this pass computes what the model's own does."""
    config = model.config.get_text_config(decoder=True)
    return model.device.type == "cpu" and why_unsupported(config) is None


def has_blocked_products() -> bool:
    """Whether this PyTorch has oneDNN's products over blocked weights; they are no public API, so they are tried."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = (torch.linspace(-1, 1, rows * 16).view(rows, 16) for rows in (_LEAST_ROWS, 32))
    try:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        out = torch.ops.mkldnn._linear_pointwise(x, blocked, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(out, F.linear(x, weight), atol=1e-4)


@torch.inference_mode()
def least_blocked_rows(products: Sequence[Product]) -> int:
    """The fewest rows for which the blocked weights are clearly faster here, timed on the first of `products`."""
    timed, num_bytes = [], 0
    for product in products:
        if product.blocked is None:
            return _LEAST_ROWS
        timed.append(product)
        num_bytes += sum(linear.weight.nbytes for linear in product.linears)
        if num_bytes >= _TIMED_BYTES:
            break
    else:
        return _LEAST_ROWS
    for rows in range(1, _LEAST_ROWS):
        inputs = [torch.ones(rows, product.linears[0].weight.shape[1]) for product in timed]
        plain = _seconds([product.from_plain for product in timed], inputs)
        if plain > _CLEARLY * _seconds([product.from_blocked for product in timed], inputs):
            return rows
    return _LEAST_ROWS


def _seconds(products: Sequence[Callable[[torch.Tensor], torch.Tensor]], inputs: Sequence[torch.Tensor]) -> float:
    """Least time of all products, one after the other."""
    times = []
    for _ in range(_TIMINGS):
        start = time.perf_counter()
        for multiply, x in zip(products, inputs, strict=True):
            multiply(x)
        times.append(time.perf_counter() - start)
    return min(times)


def _read_layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=Product(attention.q_proj, attention.k_proj, attention.v_proj),
        out=Product(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=Product(mlp.gate_proj, mlp.up_proj),
        down=Product(mlp.down_proj),
    )
