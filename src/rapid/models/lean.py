"""The forward pass of a Llama-shaped model over a static cache, in as few kernels as PyTorch allows.

transformers' forward is general: it asks the host for lengths, builds masks and launches a thousand small kernels a
token. On a GPU, where a decode step is bound by reading weights, those launches are the step. This one runs the same
modules' weights with one product for Q, K, V and one for the two gates, reads its position from the device, and so
can be captured as a CUDA graph. Numbers agree with transformers' up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from rapid.errors import ModelError
from rapid.models.split_attention import OldAttention, blend_block, block_mask, split_attention
from rapid.models.static_cache import StaticCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Architectures whose layers are exactly those of `project` and `finish`.
SUPPORTED = ("llama", "mistral", "qwen2")
# Rotary embeddings that depend on positions only; others change with the length, which the host would have to know.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: two norms [hidden] and four products."""

    attention_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LeanDecoder:
    """Reads the weights of a transformers model; projections that are used together become views of one matrix, so
    there is still one copy and the model itself goes on working. Make one decoder of a model: a second one would join
    the matrices again.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None) -> None:
        config = model.config.get_text_config(decoder=True)
        if problem := why_unsupported(config):
            raise ModelError(f"the static-shape forward pass cannot run this model: {problem}; run it without graphs")
        body: Any = model.model
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size = vocab_size or int(config.vocab_size)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.num_heads)
        self.embed: Linear = body.embed_tokens
        self.rotary = body.rotary_emb
        self.norm: torch.Tensor = body.norm.weight
        self.head: Linear = model.get_output_embeddings()
        self.eps = float(config.rms_norm_eps)
        self.layers = [_read_layer(layer) for layer in body.layers]
        self._project, self._blend, self._finish = project, blend_block, finish

    def compiled(self) -> LeanDecoder:
        """The same weights with the small kernels of a layer fused by torch.compile, in seconds, on first use."""
        other = copy(self)
        fused: Any = torch.compile  # its overloads lose the types of what it is given
        other._project, other._blend, other._finish = fused(project), fused(blend_block), fused(finish)
        return other

    def with_linears(self, convert: Callable[[nn.Linear], Linear]) -> LeanDecoder:
        """The same model with every product replaced by `convert(linear)`: a quantised drafter, which shares
        embeddings and norms."""
        other = copy(self)
        # Products read from a model are nn.Linear; only those can be converted.
        products: Any = convert
        other.head = products(self.head)
        other.layers = [
            replace(
                layer,
                qkv=products(layer.qkv),
                out=products(layer.out),
                gate_up=products(layer.gate_up),
                down=products(layer.down),
            )
            for layer in self.layers
        ]
        return other

    def new_cache(self, capacity: int) -> StaticCache:
        """An empty cache for this model."""
        return StaticCache(
            len(self.layers), self.num_kv_heads, self.head_dim, capacity, dtype=self.dtype, device=self.device
        )

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: StaticCache, old: OldAttention, bucket: int) -> torch.Tensor:
        """Logits [n, vocab_size] in float32 of ids [n] after what `cache` holds. Their keys and values are written;
        `cache.advance` makes them count. `bucket` is `old.bucket` of the cache's length."""
        positions = cache.positions(len(ids))
        x = self.embed(ids)
        cos, sin = (table[0, :, None] for table in self.rotary(x, positions[None]))
        attend_old = old.plan(cache.device_length, bucket)
        visible = block_mask(len(ids), self.num_heads // self.num_kv_heads, self.device)
        for number, layer in enumerate(self.layers):
            query, keys, values = self._project(
                x, layer.attention_norm, self.eps, layer.qkv, cos, sin, self.num_heads, self.num_kv_heads
            )
            cache.write(number, positions, keys, values)
            attended = split_attention(
                query,
                (keys, values),
                (cache.keys[number], cache.values[number]),
                visible,
                attend_old,
                self.head_dim**-0.5,
                self._blend,
            )
            x = self._finish(x, attended, layer.out, layer.mlp_norm, self.eps, layer.gate_up, layer.down)
        return self.head(rms_norm(x, self.norm, self.eps))[:, : self.vocab_size].float()


def project(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    qkv: Linear,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [heads, n, d], keys and values [kv_heads, n, d] of x [n, hidden]; cos, sin [n, 1, d]."""
    states = qkv(rms_norm(x, norm, eps)).view(len(x), heads + 2 * kv_heads, -1)
    turned, values = states.split((heads + kv_heads, kv_heads), dim=1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    query, keys = turned.split((heads, kv_heads), dim=1)
    return query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)


def finish(
    x: torch.Tensor,
    attended: torch.Tensor,
    out: Linear,
    norm: torch.Tensor,
    eps: float,
    gate_up: Linear,
    down: Linear,
) -> torch.Tensor:
    """The rest of a layer: output projection and the gated feed-forward block, each added to x [n, hidden]."""
    x = x + out(attended)
    gate, up = gate_up(rms_norm(x, norm, eps)).chunk(2, dim=-1)
    return x + down(F.silu(gate) * up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _read_layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
    )


@torch.no_grad()
def _joined(*linears: nn.Linear) -> nn.Linear:
    """One product that gives the outputs of all, one after the other; their parameters become views of its own."""
    if not all(isinstance(linear, nn.Linear) for linear in linears):
        raise ModelError("packed or quantised linear layers cannot be joined; load the model without packing")
    first = linears[0]
    sizes = [linear.out_features for linear in linears]
    joined = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    for name, _ in first.named_parameters():
        whole = torch.cat([getattr(linear, name) for linear in linears])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        for linear, view in zip(linears, whole.split(sizes), strict=True):
            getattr(linear, name).data = view
    return joined


def why_unsupported(config: Any) -> str | None:
    """What keeps a model's layers from being those computed here; None for nothing."""
    rope = getattr(config, "rope_parameters", None) or {}
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if config.model_type not in SUPPORTED:
        return f"its architecture is {config.model_type}, not one of {', '.join(SUPPORTED)}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}"
    if rope.get("rope_type", "default") not in _ROPE_TYPES:
        return f"its rotary embedding is {rope['rope_type']}"
    if sliding and sliding < config.max_position_embeddings:
        return "it has a sliding window"
    return None
