"""The local backend: transformers models in this process, on a CPU or one GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from rapid.backends.base import BackendSettings, GenerateRequest, Generation, ModelInfo
from rapid.decode.loop import decode
from rapid.drafting.model import ModelDrafter, shared_prefix
from rapid.errors import VocabularyMismatch
from rapid.models.base import LanguageModel, ProgressFn, TokenSequence
from rapid.models.hf import HFModel
from rapid.models.weights import eos_token_ids, load_weights, resolve
from rapid.types import StageProgress


class LocalBackend:
    """Target and drafter as `HFModel`s; with self-speculation they are one object, so one copy of the weights."""

    def __init__(self, target: HFModel, drafter: HFModel, target_info: ModelInfo, drafter_info: ModelInfo) -> None:
        self.target_model = target
        self.drafter_model = drafter
        self.target = target_info
        self.drafter = drafter_info

    @classmethod
    def load(cls, settings: BackendSettings, progress: StageProgress | None = None) -> LocalBackend:
        """Load what `settings` names. Raises `ModelError` for what cannot be found or used."""
        sources = [resolve(settings.target)]
        if settings.drafter != "self":
            sources.append(resolve(settings.drafter))
        if settings.threads:
            torch.set_num_threads(settings.threads)
        report = (lambda what, done: progress(what.capitalize(), round(100 * done), 100)) if progress else None
        loaded = []
        for name, source in zip((settings.target, settings.drafter), sources, strict=False):
            model, tokenizer = load_weights(source, dtype=settings.dtype, device=settings.device, progress=report)
            loaded.append(wrap(name, model, tokenizer))
        (target, target_info), (drafter, drafter_info) = loaded[0], loaded[-1]
        if drafter is not target:
            require_same_vocabulary(target_info, drafter_info)
        return cls(target, drafter, target_info, drafter_info)

    @property
    def self_speculation(self) -> bool:
        return self.target_model is self.drafter_model

    def open(self) -> LocalReader:
        return LocalReader(self.target_model, self.drafter_model)


class LocalReader:
    """One document's caches: the target's over the document, one more per model for retrieved prompts."""

    def __init__(self, target: LanguageModel, drafter: LanguageModel) -> None:
        self._drafter_model = drafter
        self._document = target.new_sequence()
        self._drafting = drafter.new_sequence()
        # The target reads a retrieved prompt only for method rag; with self-speculation the drafter just did.
        self._retrieved = self._drafting if drafter is target else target.new_sequence()

    def prefill(self, token_ids: list[int], progress: ProgressFn | None = None) -> float:
        return _read(self._document, token_ids, progress)

    def generate(self, request: GenerateRequest, progress: ProgressFn | None = None) -> Generation:
        target = self._document if request.reads == "document" else self._retrieved
        prompt = request.target_prompt
        prefill_s = _read(target, prompt[:-1], progress)
        drafter, draft_prefill_s = None, 0.0
        if request.draft_prompt is not None and request.settings.num_draft_tokens > 0:
            drafter = ModelDrafter(self._drafting, request.draft_prompt, self._drafter_model.eos_token_ids)
            start = time.perf_counter()
            drafter.start(progress)
            draft_prefill_s = time.perf_counter() - start
        generator = torch.Generator().manual_seed(request.seed)
        rounds = decode(target, prompt, drafter, request.settings, request.stop, generator)
        return Generation(prefill_s, draft_prefill_s, rounds)


def _read(sequence: TokenSequence, token_ids: list[int], progress: ProgressFn | None) -> float:
    """Make `sequence` hold exactly `token_ids`, reusing the beginning it already holds; seconds it took."""
    start = time.perf_counter()
    keep = shared_prefix(sequence.token_ids, token_ids)
    sequence.rewind(keep)
    if keep < len(token_ids):
        sequence.prefill(token_ids[keep:], progress)
    return time.perf_counter() - start


def wrap(name: str, model: Any, tokenizer: Any) -> tuple[HFModel, ModelInfo]:
    """A loaded transformers model and tokenizer behind our contracts."""
    ends = eos_token_ids(model, tokenizer)
    wrapped = HFModel(model, name=name, vocab_size=len(tokenizer), eos_token_ids=ends)
    wrapped.use_grouped_attention()
    info = ModelInfo(name, wrapped.window, wrapped.vocab_size, ends, wrapped.num_parameters, tokenizer)
    return wrapped, info


def require_same_vocabulary(target: ModelInfo, drafter: ModelInfo) -> None:
    """Raise `VocabularyMismatch` unless both tokenizers give every id the same token.

    Contents are compared, not sizes: heads padded to different widths over one tokenizer are fine.
    """
    ours = {i: token for token, i in target.tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in drafter.tokenizer.get_vocab().items()}
    for token_id in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(token_id), theirs.get(token_id)
        if mine != other:
            raise VocabularyMismatch(
                f"drafter {drafter.name} does not share the vocabulary of target {target.name}: token "
                f"{token_id} is {mine!r} for the target and {other!r} for the drafter; choose a drafter of the "
                "same family, or `self`"
            )
