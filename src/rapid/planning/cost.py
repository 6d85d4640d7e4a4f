"""The prediction for a context, and the refusal of what does not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rapid.errors import InvalidParameter, ModelError
from rapid.planning.hardware import Hardware
from rapid.planning.shape import DTYPE_BYTES, GIB, ModelShape

# Interpreter, torch (CPU build), transformers and a tokenizer, resident beside any weight (Linux, measured).
RUNTIME_BYTES = 440 * 2**20
# The embedded embedder with sentence-transformers and the index of a document.
RETRIEVAL_BYTES = 125 * 2**20
# Tokens for which a cache has room beyond prompt and answer: the longest draft, and the next question and answer.
SPARE_TOKENS = 640
# Tokens read at once while a prompt is read: they bound its scratch memory.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Plan:
    """The prediction for one context: bytes and seconds.

    peak_bytes  weights (packed ones, and those laid out for short blocks, beside their originals), both caches as they
                are allocated, the scratch memory of prefill, the program and its embedder.
    """

    hardware: str
    context: int
    retrieved: int
    max_new_tokens: int
    num_draft_tokens: int
    acceptance_rate: float
    weight_bytes: int
    target_cache_bytes: int
    draft_cache_bytes: int
    scratch_bytes: int
    peak_bytes: int
    decode_s: float
    verify_s: float
    draft_step_s: float
    prefill_s: float
    draft_prefill_s: float
    speed_up: float


def plan(
    target: ModelShape,
    hardware: Hardware,
    context: int,
    *,
    drafter: ModelShape | None = None,
    retrieved: int = 4096,
    max_new_tokens: int = 256,
    num_draft_tokens: int = 10,
    acceptance_rate: float = 0.8,
) -> Plan:
    """Predict memory and time of RAPID at `context` tokens.

    drafter          None: self-speculation, the target's weights over a cache of `retrieved` tokens.
    acceptance_rate  accepted / drafted; a round emits 1 + acceptance_rate * num_draft_tokens tokens.
    """
    if context < 1 or retrieved < 1 or num_draft_tokens < 1 or max_new_tokens < 0:
        raise InvalidParameter("context, retrieved and num_draft_tokens must be at least 1 to plan with")
    if not 0 <= acceptance_rate <= 1:
        raise InvalidParameter(f"acceptance_rate must be between 0 and 1, got {acceptance_rate}")
    draft = drafter or target
    weights = target.weight_bytes + (drafter.weight_bytes if drafter else 0)
    copies = sum(
        shape.mapped_bytes + (shape.blocked_bytes(hardware.memory_bytes) if hardware.on_cpu else 0)
        for shape in (target, drafter)
        if shape
    )
    target_cache = target.cache_bytes_per_token * (context + max_new_tokens + SPARE_TOKENS)
    draft_cache = draft.cache_bytes_per_token * (retrieved + max_new_tokens + SPARE_TOKENS)
    scratch = max(_scratch_bytes(target, context, hardware.on_cpu), _scratch_bytes(draft, retrieved, hardware.on_cpu))
    decode = hardware.step_s(target, context)
    verify = hardware.step_s(target, context, num_draft_tokens + 1)
    # Measured decode times are the target's own; a larger drafter has none.
    draft_hardware = hardware if drafter is None else replace(hardware, decode_times=())
    draft_step = draft_hardware.step_s(draft, retrieved)
    tokens = 1 + acceptance_rate * num_draft_tokens
    return Plan(
        hardware=hardware.name,
        context=context,
        retrieved=retrieved,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        acceptance_rate=acceptance_rate,
        weight_bytes=weights,
        target_cache_bytes=target_cache,
        draft_cache_bytes=draft_cache,
        scratch_bytes=scratch,
        peak_bytes=weights + copies + target_cache + draft_cache + scratch + RUNTIME_BYTES + RETRIEVAL_BYTES,
        decode_s=decode,
        verify_s=verify,
        draft_step_s=draft_step,
        prefill_s=hardware.prefill_s(target, context),
        draft_prefill_s=draft_hardware.prefill_s(draft, retrieved),
        speed_up=tokens * decode / (num_draft_tokens * draft_step + verify),
    )


def check_fits(plan: Plan, available_bytes: int) -> None:
    """Raise `ModelError` with the figures where `plan` needs more than `available_bytes`."""
    if plan.peak_bytes <= available_bytes:
        return
    parts = (
        f"weights {_gib(plan.weight_bytes)}, target cache {_gib(plan.target_cache_bytes)}, "
        f"draft cache {_gib(plan.draft_cache_bytes)}"
    )
    per_token = plan.target_cache_bytes / (plan.context + plan.max_new_tokens + SPARE_TOKENS)
    longest = plan.context - math.ceil((plan.peak_bytes - available_bytes) / per_token)
    if longest < 1:
        cure = "use a smaller model or a smaller dtype"
    else:
        cure = f"use at most {longest:,} tokens of context, or a smaller model"
    raise ModelError(
        f"{plan.context:,} tokens need {_gib(plan.peak_bytes)} ({parts}), {_gib(available_bytes)} are free: {cure}"
    )


def check_loading(weight_bytes: int, available_bytes: int) -> None:
    """Raise `ModelError` with the figures where weights alone need more memory than there is."""
    if weight_bytes > available_bytes:
        raise ModelError(
            f"the weights need {_gib(weight_bytes)} of memory and {_gib(available_bytes)} are free: use a smaller "
            "model or a smaller dtype, or free some memory (`rapid plan` says what a model needs)"
        )


def check_cache(num_tokens: int, cache_bytes: int, available_bytes: int) -> None:
    """Raise `ModelError` with the figures where the cache of a text needs more memory than there is."""
    if cache_bytes > available_bytes:
        raise ModelError(
            f"a text of {num_tokens:,} tokens needs {_gib(cache_bytes)} more for its keys and values and "
            f"{_gib(available_bytes)} are free: use a shorter document, method rag, or a smaller model, or free some "
            "memory (`rapid plan` says what a document needs)"
        )


def _scratch_bytes(shape: ModelShape, length: int, on_cpu: bool) -> int:
    """Activations of one prefill chunk in float32 (feed-forward block, projections of attention), its causal mask as
    booleans and numbers, and on a CPU a layer's keys and values for all heads."""
    chunk = min(PREFILL_CHUNK, length)
    activations = 4 * chunk * (3 * shape.intermediate_size + 4 * shape.hidden_size)
    expanded = on_cpu and shape.num_heads > shape.num_kv_heads
    keys_and_values = 2 * shape.num_heads * shape.head_dim * length * DTYPE_BYTES[shape.dtype] if expanded else 0
    return activations + 5 * chunk * length + keys_and_values


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
