"""The sections of the GPU benchmark, in the order in which each needs what the ones before found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from gpu_loop import EventTimer, HostTimer, Run, SyntheticAcceptance, Timer, decode
from gpu_model import LLAMA_8B, QUANTISED, TINY, quantiser, random_llama
from gpu_report import Row, Section, first_line

from rapid.decode.control import Controller, FixedDraft
from rapid.decode.governor import Governor
from rapid.models.graphs import BlockRunner
from rapid.models.lean import LeanDecoder
from rapid.models.split_attention import (
    FlashOld,
    Flex,
    FrozenOld,
    OldAttention,
    PlainOld,
    attend,
    sdpa_cudnn,
    sdpa_flash,
)
from rapid.models.static_cache import StaticCache
from rapid.planning import ModelShape
from rapid.sampling.verify import AcceptanceRule

BLOCKS = tuple(range(1, 12))
# Blocks that transformers, the eager stack and the attention paths are measured for.
COMPARED_BLOCKS = (1, 5, 11)
GAMMA = 10
PER_TOKEN_ACCEPTANCE = (0.955, 0.9)
# Error of an attention path relative to the formula in float32; one that is further off is not considered.
MOST_ATTENTION_ERROR = 0.02
# Tokens by which the cache is shorter when a path's values are checked: no round number.
SHORTER = 37
# Layers whose caches a timing of attention runs through, so that the GPU's own cache does not serve it.
LAYERS_TIMED = 8
# Room of a cache beyond its context: a padded block, a draft, and an answer that overshoots.
SLACK = 64
# Share of the total time that each section may take; the last one gets what is left.
SHARES = {
    "limits": 0.03,
    "checks": 0.05,
    "attention": 0.15,
    "transformers": 0.1,
    "steps": 0.27,
    "draft": 0.35,
    "decode": 1.0,
}

# Method, drafter (empty: none) and per-token acceptance of an end-to-end run.
Case = tuple[str, str, float]


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often."""

    device: str
    tiny: bool
    contexts: tuple[int, ...]
    draft_context: int
    tokens: int
    repeats: int
    seconds: float
    seed: int


class Bench:
    """Model, caches and clocks, and a method for each section, which yields its rows."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.on_cuda = self.device.type == "cuda"
        self.timer: Timer = EventTimer() if self.on_cuda else HostTimer()
        # Each kind of linear layer compiles the same functions anew, for one token and for several.
        torch._dynamo.config.recompile_limit = 64
        dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.model = random_llama(TINY if settings.tiny else LLAMA_8B, dtype, self.device, settings.seed)
        self.shape = ModelShape.from_config(self.model.config.to_dict(), str(dtype).removeprefix("torch."))
        self.decoder = LeanDecoder(self.model)
        room = settings.tokens + SLACK
        self.target_cache = self._random_cache(max(settings.contexts) + room)
        self.draft_cache = self._random_cache(settings.draft_context + room)
        self.prompt = torch.randint(0, self.shape.vocab_size, (max(BLOCKS),), device=self.device)
        # Found on the way: bytes/s, the attention, the fastest stack, drafters, and seconds of steps.
        self.bandwidth = float("nan")
        self.old: OldAttention = FlashOld() if self.on_cuda else PlainOld()
        self.target = self._runner(self.decoder, self.target_cache)
        self.stack = "graphs" if self.on_cuda else "eager"
        self.drafters: dict[str, BlockRunner] = {}
        self.transformers_s: dict[tuple[int, int], float] = {}
        self.step_samples: dict[tuple[int, int], list[float]] = {}
        self.draft_samples: dict[str, list[float]] = {}

    def sections(self) -> list[Section]:
        """In order, with their time boxes."""
        return [Section(name, share * self.settings.seconds, getattr(self, name)) for name, share in SHARES.items()]

    def limits(self) -> Iterator[Row]:
        """What this device reaches: a copy, bytes read and written, and a matrix product."""
        source = torch.randint(256, (2**22 if self.settings.tiny else 2**31,), dtype=torch.uint8, device=self.device)
        into = torch.empty_like(source)
        self.bandwidth = 2 * source.numel() / median(self._time(lambda: into.copy_(source)))
        yield {"limit": "copy", "bytes_per_s": self.bandwidth}
        n = 256 if self.settings.tiny else 8192
        a, b = (torch.randn(n, n, device=self.device).to(self.model.dtype) for _ in range(2))
        yield {"limit": "matmul", "flops_per_s": 2 * n**3 / median(self._time(lambda: a @ b))}

    def checks(self) -> Iterator[Row]:
        """Our forward pass against transformers' on the same cache, block by block."""
        context = min(self.settings.contexts)
        for block in COMPARED_BLOCKS:
            ids = self.prompt[:block]
            expected = self._transformers(self._dynamic_cache(context), ids)
            _hold(self.target_cache, context)
            logits = self.target.run(ids)
            agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
            yield {
                "context": context,
                "block": block,
                "relative_error": _error(logits, expected),
                "argmax_agreement": float(agreement),
            }

    def attention(self) -> Iterator[Row]:
        """One layer's attention to the cached part, by each path; the fastest right one serves what follows."""
        totals: dict[str, float] = {}
        paths = self._attention_paths()
        for context in self.settings.contexts:
            _hold(self.target_cache, context)
            for block in COMPARED_BLOCKS:
                for name, path in paths.items():
                    row = {"context": context, "block": block, "path": name}
                    try:
                        row |= self._time_attention(path, block)
                    except Exception as error:  # a path that this device or PyTorch lacks
                        row["reason"] = first_line(error)
                    totals[name] = totals.get(name, 0.0) + row.get("seconds", float("inf"))
                    yield row
                yield {"context": context, "block": block, "path": "stock sdpa", **self._time_stock_attention(block)}
        best = min(totals, key=lambda name: totals[name])
        if totals[best] < float("inf"):
            self.old = paths[best]
            self.target = self._runner(self.decoder, self.target_cache)
            yield {"chosen": best}

    def transformers(self) -> Iterator[Row]:
        """Eager transformers with sdpa and DynamicCache: what most programs run."""
        for context in self.settings.contexts:
            cache = self._dynamic_cache(context)
            for block in COMPARED_BLOCKS:

                def step(block: int = block, cache: Any = cache) -> None:
                    self._transformers(cache, self.prompt[:block])
                    cache.crop(-block)

                seconds = median(self._time(step))
                self.transformers_s[context, block] = seconds
                yield self._step_row(context, block, "transformers eager", seconds)

    def steps(self) -> Iterator[Row]:
        """Decode step and verify blocks of our stack: eager, as graphs, as graphs with compiled layers."""
        best = float("inf")
        for stack, decoder in self._stacks():
            runner = self._runner(decoder, self.target_cache, graphs=self.on_cuda and stack != "eager")
            samples = {}
            for context in self.settings.contexts:
                for block in COMPARED_BLOCKS if stack == "eager" and self.on_cuda else BLOCKS:
                    samples[context, block] = self._time_runner(runner, context, self.prompt[:block])
                    yield self._step_row(context, block, stack, median(samples[context, block]))
            total = sum(median(samples[context, 1]) for context in self.settings.contexts)
            if total < best:
                best, self.stack, self.target, self.step_samples = total, stack, runner, samples
        yield {"chosen": self.stack}

    def draft(self) -> Iterator[Row]:
        """A draft step over the retrieved context: the target's own weights, and weight-only quantised ones."""
        context = self.settings.draft_context
        base = self.decoder.compiled() if self.stack == "graphs, compiled" else self.decoder
        variants: list[tuple[str, int, Callable[[], LeanDecoder]]] = [("self", 0, lambda: base)]
        for name in QUANTISED:
            bits, convert = quantiser(name)
            variants.append((name, bits, lambda convert=convert: base.with_linears(convert)))  # type: ignore[misc]
        for name, bits, make in variants:
            row: Row = {"context": context, "block": 1, "drafter": name, "stack": self.stack}
            try:
                runner = self._runner(make(), self.draft_cache)
                # Two tokens are read after a round that kept its whole draft.
                samples = {block: self._time_runner(runner, context, self.prompt[:block]) for block in (1, 2)}
            except Exception as error:  # a product that this device or PyTorch lacks
                yield {**row, "reason": first_line(error)}
                continue
            self.drafters[name], self.draft_samples[name] = runner, samples[1]
            for block, seconds in samples.items():
                yield row | {"block": block} | self._bounded(median(seconds), self._bound(context, bits))

    def decode(self) -> Iterator[Row]:
        """Tokens per second end to end, methods interleaved, under synthetic acceptance."""
        for context in sorted(self.settings.contexts, reverse=True):  # the longest first: it must not be cut off
            cases: list[Case] = [("lc", "", 0.0)]
            for per_token in PER_TOKEN_ACCEPTANCE:
                for name in self.drafters:
                    if name == "self":
                        cases += [(method, name, per_token) for method in ("sd", "rapid", "auto")]
                    elif context == max(self.settings.contexts):
                        cases += [(method, name, per_token) for method in ("rapid", "auto")]
            self._prepare(context)
            runs: dict[Case, list[Run]] = {case: [] for case in cases}
            for case in cases:
                self._decode(context, case, seed=-1, tokens=2 * GAMMA)
            for repeat in range(self.settings.repeats):
                for case in cases:
                    runs[case].append(self._decode(context, case, seed=repeat, tokens=self.settings.tokens))
            plain = median(_rate(run) for run in runs["lc", "", 0.0])
            for case in cases:
                yield {"context": context, **_decode_row(case, runs[case], plain)}

    # --- parts ---------------------------------------------------------------------------------------------------

    def _attention_paths(self) -> dict[str, OldAttention]:
        paths: dict[str, OldAttention] = {
            "flash, length on device": FlashOld(),
            "flash, frozen prefix": FrozenOld(sdpa_flash),
            "cudnn, frozen prefix": FrozenOld(sdpa_cudnn),
            "formula": PlainOld(),
        }
        # Without a GPU, FlexAttention compiles for a minute to show nothing.
        return {**paths, "flex, frozen prefix": FrozenOld(Flex())} if self.on_cuda else paths

    def _time_attention(self, path: OldAttention, block: int) -> Row:
        cache, layers = self.target_cache, range(min(LAYERS_TIMED, self.shape.num_layers))
        scaling = self.shape.head_dim**-0.5
        group = self.shape.num_heads // self.shape.num_kv_heads
        rows = self._normal(self.shape.num_kv_heads, group * block, self.shape.head_dim)
        error = self._attention_error(path, rows, scaling)
        if not error < MOST_ATTENTION_ERROR:
            return {"relative_error": error, "reason": "wrong: further from the formula than rounding explains"}
        kernel = path.plan(cache.device_length, path.bucket(cache.length, cache.capacity))

        def call() -> None:
            for layer in layers:
                kernel(rows, cache.keys[layer], cache.values[layer], scaling)

        seconds = median(self._time(self._graphed(call))) / len(layers)
        return {"relative_error": error, **self._bounded(seconds, self._layer_bound(cache.length))}

    def _attention_error(self, path: OldAttention, rows: torch.Tensor, scaling: float) -> float:
        """How far a path is from the formula at a length inside its bucket, as a replayed graph meets it."""
        cache = self.target_cache
        length = cache.length - SHORTER
        kernel = path.plan(cache.device_length - SHORTER, path.bucket(length, cache.capacity))
        out, lse = kernel(rows, cache.keys[0], cache.values[0], scaling)
        everything = torch.ones(1, dtype=torch.bool, device=self.device)
        expected = attend(rows, cache.keys[0][:, :length], cache.values[0][:, :length], everything, scaling)
        return max(_error(out, expected[0]), float((lse - expected[1]).abs().max()))

    def _time_stock_attention(self, block: int) -> Row:
        """`scaled_dot_product_attention` as a program calls it: all heads, a mask where there are several tokens."""
        cache, length = self.target_cache, self.target_cache.length
        query = self._normal(1, self.shape.num_heads, block, self.shape.head_dim)
        mask = None
        if block > 1:
            mask = torch.ones(block, length, dtype=torch.bool, device=self.device).tril(length - block)

        def call() -> None:
            key, value = (whole[0][None, :, :length] for whole in (cache.keys, cache.values))
            F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

        try:
            return self._bounded(median(self._time(call)), self._layer_bound(length))
        except Exception as error:  # out of memory where it leaves the fused kernels
            return {"reason": first_line(error)}

    def _stacks(self) -> Iterator[tuple[str, LeanDecoder]]:
        yield "eager", self.decoder
        if self.on_cuda:
            yield "graphs", self.decoder
            yield "graphs, compiled", self.decoder.compiled()

    def _runner(self, decoder: LeanDecoder, cache: StaticCache, graphs: bool | None = None) -> BlockRunner:
        return BlockRunner(decoder, cache, attention=self.old, graphs=graphs)

    def _prepare(self, context: int) -> None:
        """Capture every graph an answer can need, so that none is captured while it is timed."""
        _hold(self.target_cache, context)
        _hold(self.draft_cache, self.settings.draft_context)
        self.target.prepare(self.settings.tokens + GAMMA, GAMMA + 1)
        for drafter in self.drafters.values():
            drafter.prepare(self.settings.tokens + GAMMA, 2)

    def _decode(self, context: int, case: Case, seed: int, tokens: int) -> Run:
        method, name, per_token = case
        _hold(self.target_cache, context)
        _hold(self.draft_cache, self.settings.draft_context)
        rule = AcceptanceRule("paper", 10.0) if method == "rapid" else AcceptanceRule("exact")
        controller: Controller = FixedDraft("model" if name else None, GAMMA)
        if method == "auto":
            controller = self._governor(context, name)
        return decode(
            self.target,
            self.drafters[name] if name else None,
            int(self.prompt[0]),
            tokens,
            rule,
            controller,
            self.timer,
            SyntheticAcceptance(per_token, self.settings.seed + seed),
        )

    def _governor(self, context: int, drafter: str) -> Governor:
        verify = {block: s for (length, block), s in self.step_samples.items() if length == context}
        # Where the steps were cut off it has to learn them, beginning with this guess.
        governor = Governor({"model": 0.5}, max_draft_tokens=GAMMA)
        governor.calibrate(verify, {"model": self.draft_samples[drafter]})
        return governor

    def _time_runner(self, runner: BlockRunner, context: int, ids: torch.Tensor) -> list[float]:
        _hold(runner.cache, context)

        def step() -> None:
            runner.run(ids)
            runner.cache.rewind(context)

        return self._time(step)

    def _time(self, call: Callable[[], object], warm_up: int = 3) -> list[float]:
        """Seconds of each of several calls, read after the last."""
        for _ in range(warm_up):
            call()
        marks = [self.timer.mark()]
        for _ in range(3 if self.settings.tiny else 15):
            call()
            marks.append(self.timer.mark())
        return [self.timer.seconds(start, end) for start, end in pairwise(marks)]

    def _graphed(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call` as a CUDA graph, so that launches do not hide what the kernels take."""
        if not self.on_cuda:
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    @torch.no_grad()
    def _transformers(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        name = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"
        logits: torch.Tensor = self.model(input_ids=ids[None], use_cache=True, **{name: cache}).logits
        return logits[0].float()

    def _dynamic_cache(self, context: int) -> Any:
        """transformers' own cache with the first `context` random keys and values."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(self.target_cache.keys, self.target_cache.values, strict=True)):
            cache.update(keys[None, :, :context], values[None, :, :context], layer)
        return cache

    def _random_cache(self, capacity: int) -> StaticCache:
        cache = self.decoder.new_cache(capacity)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        return cache

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.model.dtype)

    def _step_row(self, context: int, block: int, stack: str, seconds: float) -> Row:
        row = {"context": context, "block": block, "stack": stack, **self._bounded(seconds, self._bound(context))}
        if (stock := self.transformers_s.get((context, block))) is not None:
            row["times_eager_transformers"] = stock / seconds
        return row

    def _bounded(self, seconds: float, bound: float) -> Row:
        return {"seconds": seconds, "ms": 1000 * seconds, "bound_s": bound, "times_bound": seconds / bound}

    def _bound(self, context: int, bits: int = 0) -> float:
        """Seconds that reading the weights (of `bits` each; 0: as they are) and the cache takes at least."""
        weights = self.shape.read_bytes * (bits / (8 * self.model.dtype.itemsize) if bits else 1)
        return (weights + self.shape.cache_bytes_per_token * context) / self.bandwidth

    def _layer_bound(self, context: int) -> float:
        return self.shape.cache_bytes_per_token / self.shape.num_layers * context / self.bandwidth


def _hold(cache: StaticCache, length: int) -> None:
    """Make the first `length` random tokens count."""
    cache.rewind(0)
    cache.advance(length)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _rate(run: Run) -> float:
    return len(run.token_ids) / run.seconds


def _decode_row(case: Case, runs: Sequence[Run], plain: float) -> Row:
    method, drafter, per_token = case
    drafted, rounds = sum(run.drafted for run in runs), sum(run.rounds for run in runs)
    accepted = sum(run.accepted for run in runs)
    lengths: dict[int, int] = {}
    for run in runs:
        for length, count in run.draft_lengths.items():
            lengths[length] = lengths.get(length, 0) + count
    rates = [_rate(run) for run in runs]
    return {
        "method": method,
        "drafter": drafter or None,
        "acceptance": "synthetic" if drafter else "none: nothing is drafted",
        "per_token_acceptance": per_token if drafter else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / rounds,
        "draft_lengths": {str(length): lengths[length] for length in sorted(lengths)},
        "tokens_per_s": median(rates),
        "tokens_per_s_of_each": rates,
        "times_lc": median(rates) / plain,
    }
