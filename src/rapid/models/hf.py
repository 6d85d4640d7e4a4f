"""A transformers causal LM behind the `LanguageModel` contract: one set of weights, any number of sequences.

Only transformers' public API is used; nothing is patched. A model whose cache cannot rewind is refused by name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rapid.errors import ModelError, PromptTooLong
from rapid.models import attention, packing, short_blocks
from rapid.models.base import ProgressFn
from rapid.models.cache import HEADROOM, GrowingCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens read at once while prefilling: large enough for full matrix products, small enough for steady progress.
PREFILL_CHUNK = 512
# Values of each weight tensor that stand for all of it in a fingerprint: training or converting changes nearly all.
_SAMPLE = 64
# Entries of a config that say how it was loaded, not what the model computes.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


class HFModel:
    """Weights of a transformers causal LM. `vocab_size` is the tokenizer's: padding rows of the head are cut."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        window: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        refuse_if_it_cannot_rewind(config, name)
        self.model = model
        self.name = name
        self.vocab_size = min(vocab_size, int(config.vocab_size))
        self.window = window or int(getattr(config, "max_position_embeddings", None) or 2**31)
        self.eos_token_ids = eos_token_ids
        self.num_parameters = _num_parameters(model, self.vocab_size)
        self.weight_bytes = _weight_bytes(model)
        self.num_layers = int(config.num_hidden_layers)
        self.device = model.device
        self.cache_dtype = cache_dtype
        self.packed = False
        self._short_blocks: short_blocks.ShortBlocks | None = None
        # transformers renamed the argument on its way through version 5.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._can_skip_logits = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the config and of a sample of every weight: equal for models that fill a cache equally."""
        config = self.model.config.get_text_config(decoder=True).to_dict()
        described = {name: value for name, value in config.items() if name not in _INCIDENTAL}
        sha = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
        for name, weight in self.model.named_parameters():
            sha.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            flat = weight.detach().reshape(-1)
            at = torch.linspace(0, flat.numel() - 1, min(_SAMPLE, flat.numel()), dtype=torch.float64).long()
            sha.update(flat[at.to(flat.device)].cpu().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    @cached_property
    def cache_shapes(self) -> list[tuple[torch.Size, torch.Size]]:
        """Shapes of the keys and the values of one token, by layer, as the model itself makes them."""
        cache = GrowingCache(self.num_layers, self.cache_dtype)
        self.run([0], cache, logits_to_keep=1)
        return [(keys.shape, values.shape) for keys, values in cache.read(1)]

    def step_bytes(self, length: int) -> int:
        """Bytes that one decode step after `length` tokens has to read: weights and cache."""
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = 2 * self.num_layers * heads * head_dim * (self.cache_dtype or self.model.dtype).itemsize
        return int(self.weight_bytes + cache * length)

    def use_grouped_attention(self) -> None:
        """Switch the model to the attention of `rapid.models.attention`, where its architecture allows it."""
        attention.register()
        if getattr(self.model, "_supports_attention_backend", False):
            self.model.set_attn_implementation(attention.ATTENTION_NAME)

    def use_packed_linears(self) -> None:
        """Pack the linear layers' weights to float16. Raises `ModelError` where there are no products for it."""
        if not packing.can_pack(self.device):
            raise ModelError(f"float32-packed needs a CPU with FBGEMM; {self.name} is on {self.device}, so use float32")
        _ = self.fingerprint  # packed weights are no parameters any more
        packing.pack_linears(self.model)
        self.packed = True

    def use_short_blocks(self, *, blocked: bool = True) -> None:
        """Run blocks of a few tokens by `rapid.models.short_blocks`, where the architecture and the device allow it;
        `blocked` lets it keep a second copy of the weights. It reads the layers as they are now: pack them before."""
        if short_blocks.supports(self.model):
            self._short_blocks = short_blocks.ShortBlocks(self.model, blocked=blocked)

    def new_sequence(self) -> HFSequence:
        """An empty sequence over these weights."""
        return HFSequence(self)

    @torch.inference_mode()
    def run(
        self, token_ids: Sequence[int], cache: GrowingCache, logits_to_keep: int, first_position: int | None = None
    ) -> torch.Tensor:
        """One forward pass; logits [logits_to_keep (0: all), vocab_size] in float32.

        first_position  where the first token stands in the text; None where the cache holds all before it.
        """
        ids = torch.tensor([list(token_ids)], device=self.device)
        if self._short_blocks and len(token_ids) <= self._short_blocks.max_tokens:
            first = cache.get_seq_length() if first_position is None else first_position
            return self._short_blocks.run(ids[0], cache, first, logits_to_keep)[:, : self.vocab_size].float()
        kwargs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if first_position is not None:
            kwargs["position_ids"] = torch.arange(len(token_ids), device=self.device)[None] + first_position
        if self._can_skip_logits:
            kwargs["logits_to_keep"] = logits_to_keep
        logits: torch.Tensor = self.model(input_ids=ids, **kwargs).logits
        return logits[0, -logits_to_keep:, : self.vocab_size].float()


class HFSequence:
    """Tokens one `HFModel` has read. `token_ids` mirrors the cache, so that a shared prefix can be found."""

    def __init__(self, model: HFModel) -> None:
        self.model = model
        self.token_ids: list[int] = []
        self.cache = GrowingCache(model.num_layers, model.cache_dtype)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def window(self) -> int:
        return self.model.window

    def prefill(self, token_ids: Sequence[int], progress: ProgressFn | None = None) -> None:
        self._check_room(len(token_ids))
        self.cache.reserve(self.length + len(token_ids))
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            self.model.run(chunk, self.cache, logits_to_keep=1)
            self.token_ids.extend(chunk)
            if progress:
                progress(start + len(chunk), len(token_ids))

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        self._check_room(len(token_ids))
        logits = self.model.run(token_ids, self.cache, logits_to_keep=0)
        self.token_ids.extend(token_ids)
        return logits

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all (or the window), so that reading up to there copies nothing."""
        self.cache.reserve(min(length, self.window - HEADROOM))

    def export(self, length: int) -> dict[str, torch.Tensor]:
        """Keys and values of the first `length` tokens, [1, kv_heads, length, head_dim] each, as views."""
        return {
            name: tensor
            for layer, pair in enumerate(self.cache.read(length))
            for name, tensor in zip(_names(layer), pair, strict=True)
        }

    @torch.inference_mode()
    def restore(self, token_ids: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold `token_ids` with a copy of what `export` gave for them, in this cache's dtype and device.

        Raises `ModelError` for tensors that are missing or not of the model's shapes; nothing is held then.
        """
        self.rewind(0)
        self._check_room(len(token_ids))
        self.cache.reserve(len(token_ids))
        dtype = self.model.cache_dtype or self.model.model.dtype
        for number, (layer, shapes) in enumerate(zip(self.cache.growing, self.model.cache_shapes, strict=True)):
            read = []
            for name, (_, heads, _, head_dim) in zip(_names(number), shapes, strict=True):
                tensor = tensors.get(name)
                expected = (1, heads, len(token_ids), head_dim)
                if tensor is None or tensor.shape != expected or not tensor.is_floating_point():
                    raise ModelError(
                        f"the saved cache does not fit {self.model.name}: {name} should be {list(expected)} and is "
                        f"{'missing' if tensor is None else list(tensor.shape)}; read the documents again"
                    )
                read.append(tensor.to(self.model.device, dtype))
            layer.update(*read)
        self.token_ids.extend(token_ids)

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        del self.token_ids[length:]
        self.cache.rewind(length)

    def _check_room(self, num_tokens: int) -> None:
        # A forward pass that raised half way may have filled some layers: what counts is `token_ids`.
        self.cache.rewind(self.length)
        if self.length + num_tokens > self.window:
            raise PromptTooLong(
                f"{self.length + num_tokens} tokens do not fit the window of {self.window} of {self.model.name}; "
                "use a shorter document or question, or fewer new tokens"
            )


def _num_parameters(model: PreTrainedModel, vocab_size: int) -> int:
    """Parameters without the padding rows of embedding and head, which make no model the larger one of a pair."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(table): table for module in modules if (table := getattr(module, "weight", None)) is not None}
    padding = sum(max(0, table.shape[0] - vocab_size) * table.shape[1] for table in tables.values())
    return int(sum(p.numel() for p in model.parameters()) - padding)


def _weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads: all, but for an embedding table that is not the head's, too."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    table = model.get_input_embeddings().weight
    if getattr(model.get_output_embeddings(), "weight", None) is not table:
        tensors.pop(id(table), None)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _names(layer: int) -> tuple[str, str]:
    """Names of a layer's keys and values in a saved cache."""
    return f"layers.{layer}.keys", f"layers.{layer}.values"


def refuse_if_it_cannot_rewind(config: Any, name: str) -> None:
    """Raise `ModelError` for models with a cache that forgets or folds the past: nothing to rewind to."""
    layer_types = getattr(config, "layer_types", None)
    kinds = set(layer_types or ()) - {"full_attention"}
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; RAPID needs a decoder-only language model")
    if sliding and not layer_types and sliding < (getattr(config, "max_position_embeddings", 0) or 0):
        kinds = {"sliding_attention"}
    if kinds or not getattr(config, "num_attention_heads", None):
        raise ModelError(
            f"{name} ({getattr(config, 'model_type', 'unknown')}) has {', '.join(sorted(kinds)) or 'no'} attention "
            "layers, whose cache cannot rewind a rejected draft; choose a model with full attention in all layers"
        )
