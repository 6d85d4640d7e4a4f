"""The sizes of a model, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rapid.errors import ModelError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
# Ends a dtype whose linear layers are packed to 16 bits; all else, the cache too, is of the dtype before it.
PACKED_SUFFIX = "-packed"
PACKED_BITS = 16
GIB = 2**30
# On a CPU a float32 model of these architectures keeps a second copy of its products' weights, laid out for short
# blocks, where that takes at most this share of the memory that is free.
_BLOCKED_MODEL_TYPES = ("llama", "mistral", "qwen2")
_BLOCKED_SHARE = 0.25


def stored_dtype(named: str) -> str:
    """The dtype of all that is not packed."""
    return named.removesuffix(PACKED_SUFFIX)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer with gated feed-forward layers (Llama, Qwen2, Mistral ...).

    linear_bits  bits of a linear layer's weight where it is not of `dtype`: packed (16) or quantised (8, 4). A tied
                 head then is a second copy of its table.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    attention_bias: bool = False
    dtype: str = "float32"
    linear_bits: int | None = None
    can_be_blocked: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> ModelShape:
        """From a transformers config as a dict; `dtype` (as `Engine.load` takes it) overrules the one the weights are
        stored in.

        Raises `ModelError` where a size is missing or the architecture is one the sums do not hold for.
        """
        named = str(dtype or config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        experts = [k for k in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(k)]
        if experts:
            raise ModelError(f"cannot plan for mixture-of-experts models ({experts[0]}); use a dense model")
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            shape = cls(
                hidden_size=hidden,
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate_size=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
                dtype=stored_dtype(named),
                linear_bits=PACKED_BITS if named.endswith(PACKED_SUFFIX) else None,
                can_be_blocked=config.get("model_type") in _BLOCKED_MODEL_TYPES,
            )
        except KeyError as error:
            raise ModelError(f"the model's config has no {error.args[0]}; give the config of a causal LM") from None
        if shape.dtype not in DTYPE_BYTES:
            raise ModelError(f"cannot plan for dtype {shape.dtype}; use one of {', '.join(DTYPE_BYTES)}")
        return shape

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that every token is multiplied with; norms and biases are counted apart."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings once."""
        small = 2 * self.hidden_size
        if self.attention_bias:
            small += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        tables = 1 if self.tied_embeddings else 2
        return (
            self.num_layers * (self.layer_parameters + small)
            + self.hidden_size
            + tables * self.vocab_size * self.hidden_size
        )

    @property
    def linear_parameters(self) -> int:
        """Weights of all products of a forward pass, the head's too."""
        return self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        if self.linear_bits is None:
            return self.num_parameters * DTYPE_BYTES[self.dtype]
        table = self.vocab_size * self.hidden_size if self.tied_embeddings else 0
        rest = self.num_parameters + table - self.linear_parameters
        return self.linear_parameters * self.linear_bits // 8 + rest * DTYPE_BYTES[self.dtype]

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weights as they were read, which packing leaves mapped beside the packed ones."""
        return self.num_parameters * DTYPE_BYTES[self.dtype] if self.linear_bits == PACKED_BITS else 0

    def blocked_bytes(self, available_bytes: int) -> int:
        """Bytes of the second copy of weights that a CPU keeps for short blocks; `available_bytes` 0: unknown."""
        size = self.linear_parameters * DTYPE_BYTES["float32"]
        wanted = self.can_be_blocked and self.dtype == "float32" and self.linear_bits is None
        return size if wanted and (not available_bytes or keeps_blocked(size, available_bytes)) else 0

    @property
    def read_bytes(self) -> int:
        """Bytes of weights one forward pass reads: the embedding table is only looked up, the head is read."""
        table = self.vocab_size * self.hidden_size
        if self.linear_bits is not None or not self.tied_embeddings:
            return self.weight_bytes - table * DTYPE_BYTES[self.dtype]
        return self.weight_bytes

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, in the dtype of the weights."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def flops(self, length: int) -> float:
        """Floating-point operations of one token that attends to `length` tokens."""
        return 2 * self.linear_parameters + 4 * length * self.num_layers * self.num_heads * self.head_dim


def keeps_blocked(copy_bytes: int, available_bytes: int) -> bool:
    """Whether there is memory for a second copy of the weights."""
    return copy_bytes <= _BLOCKED_SHARE * available_bytes
