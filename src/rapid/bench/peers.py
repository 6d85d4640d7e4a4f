"""transformers' own `generate` on the same prompts: its default attention and DynamicCache, a copy of the weights of
its own, settings of the model's generation config left out.

A prompt is read once, outside the timing. `generate` cannot start assisted decoding from a filled cache, so its first
forward pass is met by a hook, which fills the empty cache with what was read and passes the last token on: each run
then starts where our own runs do. The same is done for an assistant.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig

from rapid.bench.process import peak_rss, restart_peak_rss
from rapid.bench.runs import Run
from rapid.models.quiet import quiet
from rapid.models.sources import resolve
from rapid.models.weights import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEER_METHODS = ("hf-plain", "hf-lookup", "hf-assisted")
# What a forward pass takes for its new tokens only; the attention mask covers the cache too.
_BY_POSITION = ("input_ids", "position_ids")


class _Observed:
    """A model whose forward passes are timed, wherever they are called from, and whose prompt is read already.

    passes     (tokens, seconds) of each since `restart`.
    filling_s  seconds spent on putting the reading into empty caches.
    """

    def __init__(self, name: str, dtype: str, device: str) -> None:
        loaded, _ = load_weights(resolve(name), dtype=dtype, device=device)
        self.model: PreTrainedModel = loaded
        self.model.set_attn_implementation("sdpa")
        # transformers renamed the argument on its way through version 5.
        self._cache = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        self._reading: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held = 0
        self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.model.register_forward_hook(self._after, with_kwargs=True)
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.passes: list[tuple[int, float]] = []
        self.filling_s = self.first_end = self._start = 0.0

    @property
    def seconds(self) -> float:
        """Of all passes."""
        return sum((seconds for _, seconds in self.passes), 0.0)

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int]) -> float:
        """Read in one forward pass, as `generate` would; seconds."""
        self._reading = []  # before the next one is made: two readings at once would show in peak memory
        cache = DynamicCache(config=self.model.config)
        start = time.perf_counter()
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        self.model(input_ids=ids, logits_to_keep=1, use_cache=True, **{self._cache: cache})
        seconds = time.perf_counter() - start
        layers: list[Any] = cache.layers
        self._reading, self._held = [(layer.keys, layer.values) for layer in layers], len(token_ids)
        return seconds

    def _before(self, module: Any, arguments: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        start = time.perf_counter()
        cache, ids = kwargs[self._cache], kwargs["input_ids"]
        if self._reading and cache.get_seq_length() == 0:
            for number, (keys, values) in enumerate(self._reading):
                cache.update(keys, values, number)
            sliced = {name: kwargs[name][..., self._held :] for name in _BY_POSITION if kwargs.get(name) is not None}
            kwargs = {**kwargs, **sliced}
            assert kwargs["input_ids"].shape[1] == ids.shape[1] - self._held
        self._start = time.perf_counter()
        self.filling_s += self._start - start
        return arguments, kwargs

    def _after(self, module: Any, arguments: Any, kwargs: dict[str, Any], output: Any) -> None:
        now = time.perf_counter()
        self.first_end = self.first_end or now
        self.passes.append((kwargs["input_ids"].shape[1], now - self._start))


class TransformersPeer:
    """A target, and an assistant where `hf-assisted` is measured. It reads the whole prompt, since transformers has no
    drafter of retrieved passages; for drafter `self` it is a second copy of the target."""

    def __init__(
        self, target: str, assistant: str, methods: Iterable[str], *, dtype: str, device: str, end_ids: Iterable[int]
    ) -> None:
        self._target = _Observed(target, dtype, device)
        self._assistant = None
        if "hf-assisted" in methods:
            self._assistant = _Observed(assistant, dtype, device)
        self._end_ids = sorted(end_ids)
        self._prompt: list[int] = []
        self._prefill_s = 0.0

    @property
    def models(self) -> list[PreTrainedModel]:
        """Target and assistant."""
        return [observed.model for observed in self._all]

    @property
    def _all(self) -> list[_Observed]:
        return [self._target, *([self._assistant] if self._assistant else [])]

    def read(self, prompt: Sequence[int]) -> None:
        """Read a prompt but for its last token."""
        self._prompt = list(prompt)
        self._prefill_s = self._target.read(self._prompt[:-1])
        if self._assistant:
            self._assistant.read(self._prompt[:-1])

    def run(self, method: str, max_new_tokens: int, num_draft_tokens: int) -> Run:
        """Continue the prompt by one of `PEER_METHODS`, greedily."""
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=self._end_ids, pad_token_id=self._end_ids[0]
        )
        further: dict[str, Any] = {}
        if method == "hf-lookup":
            config.prompt_lookup_num_tokens = num_draft_tokens
        if method == "hf-assisted":
            assert self._assistant is not None
            further["assistant_model"] = self._assistant.model
        for observed in self._all:
            observed.restart()
            # What is left open above must not be filled from the model's own config: it can hold penalties.
            observed.model.generation_config = GenerationConfig(num_assistant_tokens=num_draft_tokens)
        ids = torch.tensor([self._prompt], device=self._target.model.device)
        generate: Any = self._target.model.generate
        restart_peak_rss()
        with quiet():
            start = time.perf_counter()
            output = generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **further)
            token_ids = output[0, len(self._prompt) :].tolist()
            seconds = time.perf_counter() - start
        target, filling_s = self._target, sum(observed.filling_s for observed in self._all)
        return Run(
            token_ids=token_ids,
            prefill_s=self._prefill_s,
            ttft_s=self._prefill_s + target.first_end - start - filling_s,
            decode_s=seconds - filling_s,
            draft_s=self._assistant.seconds if self._assistant else 0.0,
            verify_s=target.seconds,
            rounds=len(target.passes),
            drafted=sum(tokens - 1 for tokens, _ in target.passes),
            accepted=len(token_ids) - len(target.passes),  # each round emits one token beyond them
            peak_rss_bytes=peak_rss(),
        )
