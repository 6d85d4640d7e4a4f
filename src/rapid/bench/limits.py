"""`rapid bench limits`: how far our steps are from what this machine can do.

A step cannot be faster than its weights and cache can be read, nor than its products can be made:
bound(n, L) = max((weights + cache(L)) / bandwidth, n flops(L) / rate), with both rates measured here, now, with the
threads of the run. Steps are timed over a cache filled with any text: their cost does not depend on what it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from rapid.bench.setup import load_engine
from rapid.errors import InvalidParameter
from rapid.params import Models
from rapid.planning import stored_dtype

if TYPE_CHECKING:
    from rapid.models.hf import HFModel, HFSequence

_BLOCK = 2**26  # float32 values read at once: 256 MiB, beyond any cache of a processor
_MATRIX = 1024
_FILLER = 17  # any token id


@dataclass(frozen=True)
class LimitsSettings:
    """What to measure: decode steps and verifies of `blocks` tokens at `contexts`, draft steps at `retrieved`."""

    models: Models = field(default_factory=Models)
    contexts: Sequence[int] = (1000, 4000, 7500)
    blocks: Sequence[int] = (1, 5, 11)
    retrieved: int = 1000
    repeats: int = 9

    def __post_init__(self) -> None:
        if not self.contexts or not self.blocks or min(*self.contexts, *self.blocks, self.retrieved, self.repeats) < 1:
            raise InvalidParameter("contexts, blocks, retrieved and repeats must be at least 1")


def bench_limits(settings: LimitsSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """The report: the machine's rates, and each step beside its bound."""
    loaded = load_engine(settings.models, say)
    target, drafter = loaded.backend.target_model, loaded.backend.drafter_model
    if max(settings.contexts) + max(settings.blocks) > target.window:
        raise InvalidParameter(f"contexts must fit the window of {target.window} tokens; use shorter ones")
    device = target.device
    say("measuring memory bandwidth and products")
    machine = {
        "read_bytes_per_s": read_bandwidth(device, settings.repeats),
        "copy_bytes_per_s": copy_bandwidth(device, settings.repeats),
        "flops_per_s": product_rate(device, getattr(torch, stored_dtype(settings.models.dtype)), settings.repeats),
    }
    rows: list[dict[str, Any]] = []
    for name, model, contexts, blocks in (
        ("target", target, sorted(settings.contexts), settings.blocks),
        ("draft", drafter, [settings.retrieved], (1,)),
    ):
        sequence = model.new_sequence()
        for context in contexts:
            say(f"{name}: reading {context} tokens")
            sequence.prefill([_FILLER] * (context - sequence.length))
            timed = step_times(sequence, blocks, settings.repeats)
            rows += [_row(name, model, context, block, seconds, machine) for block, seconds in timed.items()]
    further = {"contexts": list(settings.contexts), "blocks": list(settings.blocks), "retrieved": settings.retrieved}
    return {"conditions": loaded.conditions(**further), "machine": machine, "rows": rows}


def _row(
    name: str, model: HFModel, context: int, block: int, times: Sequence[float], machine: dict[str, float]
) -> dict[str, Any]:
    read = stored_bytes(model) + model.step_bytes(context) - model.step_bytes(0)
    memory_s = read / machine["read_bytes_per_s"]
    compute_s = block * step_flops(model, context) / machine["flops_per_s"]
    bound = max(memory_s, compute_s)
    return {
        "model": name,
        "step": "decode" if block == 1 else f"verify {block}",
        "context": context,
        "tokens": block,
        "seconds": median(times),
        "least_s": min(times),
        "read_bytes": read,
        "memory_bound_s": memory_s,
        "compute_bound_s": compute_s,
        "bound_s": bound,
        "ratio_to_bound": median(times) / bound,
    }


@torch.inference_mode()
def step_times(sequence: HFSequence, blocks: Sequence[int], repeats: int) -> dict[int, list[float]]:
    """Seconds of forward passes of each block size after what the sequence holds, in turn; the first is not counted."""
    length = sequence.length
    times: dict[int, list[float]] = {block: [] for block in blocks}
    for repeat in range(repeats + 1):
        for block in blocks:
            _synchronise(sequence.model.device)
            start = time.perf_counter()
            sequence.forward([_FILLER] * block)
            _synchronise(sequence.model.device)
            if repeat:
                times[block].append(time.perf_counter() - start)
            sequence.rewind(length)
    return times


def stored_bytes(model: HFModel) -> int:
    """Bytes of the weights a step reads: packed linears at their packed size; the embedding table is only looked
    up, unless it is the head as well."""
    packed: list[Any] = [
        m for m in model.model.modules() if ".quantized." in type(m).__module__ and hasattr(m, "weight")
    ]
    table, tied = _embeddings(model)
    total = sum(module.weight().numel() * torch.float16.itemsize for module in packed)
    for parameter in model.model.parameters():
        if parameter is not table or tied:
            total += parameter.numel() * parameter.element_size()
    return int(total)


def step_flops(model: HFModel, context: int) -> float:
    """Floating-point operations of one token after `context`: two per weight of a product, four per cached value of
    each query head."""
    config: Any = model.model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    products = model.num_parameters
    table, tied = _embeddings(model)
    if not tied and not config.tie_word_embeddings:
        products -= table.numel()
    return float(2 * products + 4 * context * model.num_layers * config.num_attention_heads * head_dim)


def _embeddings(model: HFModel) -> tuple[torch.Tensor, bool]:
    """The embedding table, and whether the head reads it too (a packed head has weights of its own)."""
    inputs: Any = model.model.get_input_embeddings()
    head: Any = model.model.get_output_embeddings()
    return inputs.weight, head is not None and head.weight is inputs.weight


def read_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes per second of streaming through memory: the sum of a large block."""
    block = torch.ones(_BLOCK, device=device)
    return block.numel() * block.element_size() / _best(block.sum, device, repeats)


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes per second, read and written, of copying a large block."""
    source = torch.ones(_BLOCK, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _best(lambda: target.copy_(source), device, repeats)


def product_rate(device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Floating-point operations per second of a square matrix product."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=device, dtype=dtype)
    return 2 * _MATRIX**3 / _best(lambda: matrix @ matrix, device, repeats)


def _best(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        _synchronise(device)
        start = time.perf_counter()
        call()
        _synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
