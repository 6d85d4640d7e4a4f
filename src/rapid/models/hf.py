"""A transformers causal LM behind the `LanguageModel` contract: one set of weights, any number of sequences.

Only transformers' public API is used; nothing is patched. A model whose cache cannot rewind is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rapid.errors import ModelError, PromptTooLong
from rapid.models import attention
from rapid.models.base import ProgressFn
from rapid.models.cache import GrowingCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens read at once while prefilling: large enough for full matrix products, small enough for steady progress.
PREFILL_CHUNK = 512


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
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_layers = int(config.num_hidden_layers)
        self.device = model.device
        self.cache_dtype = cache_dtype
        # transformers renamed the argument on its way through version 5.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._can_skip_logits = "logits_to_keep" in parameters

    def use_grouped_attention(self) -> None:
        """Switch the model to the attention of `rapid.models.attention`, where its architecture allows it."""
        attention.register()
        if getattr(self.model, "_supports_attention_backend", False):
            self.model.set_attn_implementation(attention.ATTENTION_NAME)

    def new_sequence(self) -> HFSequence:
        """An empty sequence over these weights."""
        return HFSequence(self)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], cache: GrowingCache, logits_to_keep: int) -> torch.Tensor:
        """One forward pass; logits [logits_to_keep (0: all), vocab_size] in float32."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        kwargs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
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


def refuse_if_it_cannot_rewind(config: Any, name: str) -> None:
    """Raise `ModelError` for models with a cache that forgets or folds the past: nothing to rewind to."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; RAPID needs a decoder-only language model")
    if sliding and not kinds and sliding < (getattr(config, "max_position_embeddings", 0) or 0):
        kinds = {"sliding_attention"}
    if kinds or not getattr(config, "num_attention_heads", None):
        raise ModelError(
            f"{name} ({getattr(config, 'model_type', 'unknown')}) has {', '.join(sorted(kinds)) or 'no'} attention "
            "layers, whose cache cannot rewind a rejected draft; choose a model with full attention in all layers"
        )
