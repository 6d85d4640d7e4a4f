"""The local backend: transformers models in this process, on a CPU or one GPU."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from rapid.backends.base import ModelInfo
from rapid.backends.memory import available_bytes, require_memory
from rapid.backends.reader import Governors, LocalReader
from rapid.errors import InvalidParameter
from rapid.models.hf import HFModel
from rapid.models.quantized import quantize
from rapid.models.weights import LoadProgress, Source, eos_token_ids, load_weights, resolve
from rapid.params import Models, drafter_bits
from rapid.planning import DTYPE_BYTES, keeps_blocked
from rapid.types import StageProgress
from rapid.vocabulary import Vocabulary, first_difference

# float32 with the linear layers' weights packed to float16: faster on a CPU, see docs/adr/0002-packed-linears.md.
PACKED = "float32-packed"


class LocalBackend:
    """Target and drafter as `HFModel`s; with self-speculation they are one object, so one copy of the weights."""

    def __init__(self, target: HFModel, drafter: HFModel, target_info: ModelInfo, drafter_info: ModelInfo) -> None:
        self.target_model = target
        self.drafter_model = drafter
        self.target = target_info
        self.drafter = drafter_info
        self._governors: Governors = {}

    @classmethod
    def load(cls, settings: Models, progress: StageProgress | None = None) -> LocalBackend:
        """Load what `settings` names. Raises `ModelError` for what cannot be found or used."""
        bits = drafter_bits(settings.drafter)
        shares = settings.drafter == "self" or bits is not None
        sources = [resolve(name) for name in ((settings.target,) if shares else (settings.target, settings.drafter))]
        device, dtype = settings.drafter_device or settings.device, settings.drafter_dtype or settings.dtype
        if shares and (device, dtype) != (settings.device, settings.dtype):
            raise InvalidParameter(
                f"drafter {settings.drafter} is where and what the target is, got device {device} and dtype {dtype}; "
                "leave them out, or name a model as the drafter"
            )
        if (device, dtype) == (settings.device, settings.dtype):
            require_memory(sources, dtype, device)
        else:
            require_memory(sources[:1], settings.dtype, settings.device)
            require_memory(sources[1:], dtype, device)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        report = (lambda what, done: progress(what.capitalize(), round(100 * done), 100)) if progress else None
        model, tokenizer = _weights(sources[0], settings.dtype, settings.device, report)
        # Before packing, which leaves no weights to quantise.
        smaller = quantize(model, bits) if bits else None
        target, target_info = wrap(settings.target, model, tokenizer, packed=settings.dtype == PACKED)
        if not shares:
            model, tokenizer = _weights(sources[1], dtype, device, report)
            drafter, drafter_info = wrap(settings.drafter, model, tokenizer, packed=dtype == PACKED)
        elif smaller is not None:
            drafter, drafter_info = wrap(settings.drafter, smaller, tokenizer)
        else:
            drafter, drafter_info = target, target_info
        return cls(target, drafter, target_info, drafter_info)

    @property
    def self_speculation(self) -> bool:
        return self.target_model is self.drafter_model

    @cached_property
    def vocabulary_difference(self) -> str | None:
        return first_difference(self.target.tokenizer, self.drafter.tokenizer)

    @cached_property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary] | None:
        if self.vocabulary_difference is None:
            return None
        ours, theirs = (Vocabulary(info.tokenizer, info.vocab_size) for info in (self.target, self.drafter))
        return ours, theirs

    def open(self) -> LocalReader:
        return LocalReader(self.target_model, self.drafter_model, self._vocabularies, self._governors)


def _weights(source: Source, dtype: str, device: str, report: LoadProgress | None) -> tuple[Any, Any]:
    """A model and its tokenizer; weights to be packed are loaded in float32."""
    return load_weights(source, dtype="float32" if dtype == PACKED else dtype, device=device, progress=report)


def wrap(name: str, model: Any, tokenizer: Any, *, packed: bool = False) -> tuple[HFModel, ModelInfo]:
    """A loaded transformers model and tokenizer behind our contracts; `packed` packs its linear layers."""
    ends = eos_token_ids(model, tokenizer)
    wrapped = HFModel(model, name=name, vocab_size=len(tokenizer), eos_token_ids=ends)
    wrapped.use_grouped_attention()
    if packed:
        wrapped.use_packed_linears()
    copy_bytes = wrapped.num_parameters * DTYPE_BYTES["float32"]
    wrapped.use_short_blocks(blocked=keeps_blocked(copy_bytes, available_bytes("cpu")))
    info = ModelInfo(name, wrapped.window, wrapped.vocab_size, ends, wrapped.num_parameters, tokenizer)
    return wrapped, info
