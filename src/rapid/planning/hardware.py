"""Machines, and how long a forward pass takes on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rapid.errors import InvalidParameter
from rapid.planning.shape import GIB, ModelShape


@dataclass(frozen=True)
class Hardware:
    """A machine, by what programs reach on it rather than by its data sheet.

    memory_bytes         what there is; 0 where unknown.
    bandwidth            bytes of weights per second.
    attention_bandwidth  bytes of cache per second while one token attends.
    flops_per_s          of matrix products.
    overhead_s           shortest forward pass: launches and Python (eager transformers: 20-25 ms for 32 layers).
    decode_times         measured (context, seconds of a decode step) of the target, ascending; they replace the
                         roofline for a single token, which stays a lower bound for blocks.
    on_cpu               prefill then expands grouped keys and values to all heads, a layer at a time.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    attention_bandwidth: float
    flops_per_s: float
    overhead_s: float = 0.0
    decode_times: tuple[tuple[int, float], ...] = ()
    on_cpu: bool = False

    def __post_init__(self) -> None:
        if min(self.bandwidth, self.attention_bandwidth, self.flops_per_s) <= 0:
            raise InvalidParameter(f"hardware {self.name}: bandwidths and flops_per_s must be above 0")
        lengths = [length for length, _ in self.decode_times]
        if any(b <= a for a, b in pairwise(lengths)) or any(s <= 0 for _, s in self.decode_times):
            raise InvalidParameter(f"hardware {self.name}: decode_times must ascend and be above 0 seconds")

    def calibrated(self, decode_rates: Mapping[int, float]) -> Hardware:
        """The same machine with measured decode rates, context -> tokens per second."""
        if not decode_rates or min(decode_rates.values()) <= 0:
            raise InvalidParameter("decode rates must be given, in tokens per second above 0")
        return replace(self, decode_times=tuple((n, 1 / rate) for n, rate in sorted(decode_rates.items())))

    def step_s(self, shape: ModelShape, length: int, num_tokens: int = 1) -> float:
        """Seconds of a forward pass of `num_tokens` tokens after `length` of them."""
        bound = max(
            self.overhead_s,
            shape.read_bytes / self.bandwidth
            + shape.cache_bytes_per_token * length / self.attention_bandwidth
            + num_tokens * shape.flops(length) / self.flops_per_s,
        )
        if not self.decode_times:
            return bound
        decode = _interpolate(self.decode_times, length)
        return decode if num_tokens == 1 else max(decode, bound)

    def prefill_s(self, shape: ModelShape, length: int) -> float:
        """Seconds of reading `length` tokens: each attends to half of them in the mean."""
        return max(self.overhead_s, length * shape.flops(length // 2) / self.flops_per_s)


# Bandwidth: about 80 % of the data sheet's, as copies reach. Rates: about 60 % of the dense bf16 peak.
# `cpu` is one thread of an AVX2 server core, fitted to SmolLM2-135M in float32 and float32-packed: decode steps and
# packed verifies of 5 tokens at 1K-8K come out within 25 %; longer verifies, and float32 ones, are underestimated more.
HARDWARE = {
    "a800": Hardware("A800-80GB", 80 * GIB, 1.6e12, 1.6e12, 1.9e14),
    "h100": Hardware("H100-80GB", 80 * GIB, 2.7e12, 2.7e12, 5.9e14),
    "h200": Hardware("H200-141GB", 141 * 10**9, 4.3e12, 4.3e12, 5.9e14),
    "cpu": Hardware("CPU, one AVX2 core", 0, 8.0e9, 5.2e9, 6.5e10, on_cpu=True),
}


def measure_host(memory_bytes: int = 0, seconds: float = 1.0) -> Hardware:
    """This machine's processor, measured with numpy: copy bandwidth and float32 matrix products.

    A single copy reads and writes; both count. Attention over a cache reaches about a third of it in torch.
    """
    import numpy as np

    source = np.ones(2**24, np.float32)
    target = np.empty_like(source)
    copy_s = _best_time(lambda: np.copyto(target, source), seconds / 2)
    matrix = np.ones((512, 512), np.float32)
    product_s = _best_time(lambda: matrix @ matrix, seconds / 2)
    bandwidth = 2 * source.nbytes / copy_s
    return Hardware("this CPU", memory_bytes, bandwidth, bandwidth / 3, 2 * 512**3 / product_s, on_cpu=True)


def _best_time(call: Any, seconds: float) -> float:
    import time

    call()  # the first one also finds its memory
    best, end = math.inf, time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _interpolate(points: Sequence[tuple[int, float]], length: int) -> float:
    """Linear between points, constant before the first, on the line of the last two after the last: decode
    time is a floor plus a cost per cached token."""
    if length <= points[0][0] or len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(points) if length <= pair[1][0]), points[-2:])
    return y0 + (y1 - y0) * (length - x0) / (x1 - x0)
