"""What a model and a document will cost in memory and time, before anything is loaded.

Sizes come from the model's config (`shape`). Times come from a roofline with a floor,

    t(n, L) = max(overhead, weights / bandwidth + cache(L) / attention_bandwidth + n flops(L) / rate),

for a forward pass of n tokens after L, or from measured decode times where there are some (`hardware`). RAPID's
speed-up is tau t(1, L) / (gamma t(1, R) + t(gamma + 1, L)), R the retrieved tokens, tau the tokens of a round
(`cost`).

Nothing here knows torch, files or a machine: configs, hardware and free memory are given.
"""

from rapid.planning.cost import (
    RETRIEVAL_BYTES,
    RUNTIME_BYTES,
    SPARE_TOKENS,
    Plan,
    check_cache,
    check_fits,
    check_loading,
    plan,
)
from rapid.planning.hardware import HARDWARE, Hardware, measure_host
from rapid.planning.shape import DTYPE_BYTES, GIB, ModelShape, keeps_blocked, stored_dtype

__all__ = [
    "DTYPE_BYTES",
    "GIB",
    "HARDWARE",
    "RETRIEVAL_BYTES",
    "RUNTIME_BYTES",
    "SPARE_TOKENS",
    "Hardware",
    "ModelShape",
    "Plan",
    "check_cache",
    "check_fits",
    "check_loading",
    "keeps_blocked",
    "measure_host",
    "plan",
    "stored_dtype",
]
