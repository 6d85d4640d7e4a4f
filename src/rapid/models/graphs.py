"""Decode steps, draft steps and verify blocks as CUDA graphs with static shapes.

A graph is captured once per (block size, bucket of the cache's length) and replayed: one launch instead of a
thousand. Block sizes are rounded up to `BLOCK_BUCKETS` with tokens that are read and then forgotten. Without CUDA the
same code runs eagerly, which is what the tests compare with `HFSequence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rapid.errors import PromptTooLong
from rapid.models.base import ProgressFn
from rapid.models.lean import LeanDecoder
from rapid.models.split_attention import FlashOld, OldAttention, PlainOld
from rapid.models.static_cache import StaticCache

# A decode or draft step, and the verify blocks of the draft lengths a governor chooses from (each plus one).
BLOCK_BUCKETS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 17)
# Tokens read at once while prefilling; the block's attention to itself is quadratic in it.
PREFILL_CHUNK = 512
# Eager passes before a capture: libraries set up their handles and workspaces, which a capture forbids.
_WARM_UP = 2


def block_bucket(num_tokens: int) -> int:
    """The smallest block size captured that holds `num_tokens`; longer blocks run eagerly, in their own size."""
    return next((size for size in BLOCK_BUCKETS if size >= num_tokens), num_tokens)


class BlockRunner:
    """Runs blocks of tokens through a decoder over one static cache.

    attention  how the cached part is attended to (default: FlashAttention on CUDA, else the formula).
    graphs     capture and replay (default: on CUDA).
    """

    def __init__(
        self,
        decoder: LeanDecoder,
        cache: StaticCache,
        *,
        attention: OldAttention | None = None,
        graphs: bool | None = None,
    ) -> None:
        on_cuda = decoder.device.type == "cuda"
        self.decoder = decoder
        self.cache = cache
        self.attention: OldAttention = attention or (FlashOld() if on_cuda else PlainOld())
        self.graphs = on_cuda if graphs is None else graphs
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None  # memory that all graphs share

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """Read ids [n] (int64, on the device); logits [n, vocab_size] in float32, valid until the next call.

        Returns before the device has computed anything. Raises `PromptTooLong` where the cache is full.
        """
        n = len(ids)
        size = block_bucket(n)
        cache = self.cache
        if cache.length + size > cache.capacity:
            raise PromptTooLong(f"{cache.length + size} tokens do not fit a static cache of {cache.capacity}")
        bucket = self.attention.bucket(cache.length, cache.capacity)
        if self.graphs and size in BLOCK_BUCKETS:
            logits = self._graph(size, bucket).replay(ids)
        else:
            padded = torch.nn.functional.pad(ids, (0, size - n))
            logits = self.decoder.forward(padded, cache, self.attention, bucket)
        cache.advance(n)
        return logits[:n]

    def prepare(self, num_tokens: int, most_tokens: int) -> None:
        """Capture now what reading `num_tokens` more tokens in blocks of at most `most_tokens` will need."""
        if not self.graphs:
            return
        length, capacity = self.cache.length, self.cache.capacity
        buckets = {self.attention.bucket(n, capacity) for n in range(length, min(length + num_tokens, capacity) + 1)}
        for bucket in sorted(buckets):
            for size in BLOCK_BUCKETS:
                if size <= block_bucket(most_tokens):
                    self._graph(size, bucket)

    def _graph(self, size: int, bucket: int) -> _Captured:
        if (size, bucket) not in self._captured:
            self._captured[size, bucket] = self._capture(size, bucket)
        return self._captured[size, bucket]

    def _capture(self, size: int, bucket: int) -> _Captured:
        ids = torch.zeros(size, dtype=torch.int64, device=self.decoder.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self.decoder.forward(ids, self.cache, self.attention, bucket)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self.decoder.forward(ids, self.cache, self.attention, bucket)
        return _Captured(graph, ids, logits)


class _Captured:
    """A graph with the tensors it reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, ids: torch.Tensor, logits: torch.Tensor) -> None:
        self._graph, self._ids, self._logits = graph, ids, logits

    def replay(self, ids: torch.Tensor) -> torch.Tensor:
        self._ids[: len(ids)].copy_(ids)
        self._graph.replay()
        return self._logits


class GraphSequence:
    """A `TokenSequence` over a static cache: what the decode loop and the drafters run on, as graphs."""

    def __init__(self, decoder: LeanDecoder, window: int, **options: Any) -> None:
        """`window` tokens are allocated at once; `options` are those of `BlockRunner`."""
        self._runner = BlockRunner(decoder, decoder.new_cache(window + BLOCK_BUCKETS[-1]), **options)
        self.token_ids: list[int] = []
        self.window = window

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def prefill(self, token_ids: Sequence[int], progress: ProgressFn | None = None) -> None:
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            self._read(chunk)
            if progress:
                progress(start + len(chunk), len(token_ids))

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        # The next call overwrites what a graph wrote; callers keep theirs.
        return self._read(token_ids).clone()

    def rewind(self, length: int) -> None:
        self._runner.cache.rewind(length)
        del self.token_ids[length:]

    def _read(self, token_ids: Sequence[int]) -> torch.Tensor:
        if self.length + len(token_ids) > self.window:
            raise PromptTooLong(
                f"{self.length + len(token_ids)} tokens do not fit the {self.window} allocated; use a shorter "
                "document or question, or fewer new tokens"
            )
        # A pass that raised half way has not advanced the cache: both still agree.
        logits = self._runner.run(torch.tensor(list(token_ids), device=self._runner.decoder.device))
        self.token_ids.extend(token_ids)
        return logits
