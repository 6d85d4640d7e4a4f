"""One document's caches on the local backend, and the drafters of each answer."""

from __future__ import annotations

import copy
import inspect
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rapid.backends.base import CacheState, DrafterName, GenerateRequest, Generation
from rapid.backends.memory import require_cache_memory
from rapid.decode.control import Controller, FixedDraft
from rapid.decode.governor import Governor
from rapid.decode.loop import DecodeSettings, decode
from rapid.drafting.ahead import AheadDrafter
from rapid.drafting.base import LONGEST_DRAFT, Drafter
from rapid.drafting.cascade import CascadeDrafter
from rapid.drafting.lookup import MIN_MATCH, LookupDrafter, LookupIndex
from rapid.drafting.model import ModelDrafter, shared_prefix
from rapid.drafting.retokenize import RetokenizingDrafter
from rapid.drafting.streaming import StreamingDrafter
from rapid.errors import ModelError, RapidError
from rapid.models.base import LanguageModel, ProgressFn, TokenSequence
from rapid.models.hf import HFSequence
from rapid.models.streaming import StreamingSequence
from rapid.params import MAX_DRAFT_TOKENS
from rapid.types import Round
from rapid.vocabulary import Vocabulary

# The model drafter's prompt is read only where speculation with it can be expected to gain this much: reading
# takes seconds that an answer must earn back.
_LEAST_GAIN = 1.1
_EXPECTED_ACCEPTANCE = 0.8
# An answer gets its room in the caches beforehand, up to this many tokens; a longer one makes them grow.
_RESERVED_ANSWER = 2048

# by the drafters to choose from and the order of magnitude (in bits) of the target's prompt
Governors = dict[tuple[tuple[DrafterName, ...], int], Governor]


class LocalReader:
    """The target's cache over the document, and those of the drafters.

    vocabularies  the target's and the drafter's, where they differ.
    governors     what earlier answers taught about costs, shared by the readers of one pair of models.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: LanguageModel,
        vocabularies: tuple[Vocabulary, Vocabulary] | None = None,
        governors: Governors | None = None,
    ) -> None:
        self._target_model = target
        self._drafter_model = drafter
        self._vocabularies = vocabularies
        self._ahead: AheadDrafter | None = None
        # Threads that ask at once take turns: a reading, or one round of an answer.
        self._turn = threading.RLock()
        self.forget()
        self._lookup: tuple[list[int], LookupIndex] | None = None
        self._governors: Governors = {} if governors is None else governors
        self._requests = 0
        self._answering: weakref.ref[Generator[Round, None, None]] | None = None

    def prefill(self, token_ids: list[int], progress: ProgressFn | None = None) -> float:
        with self._turn:
            self._interrupt()
            _reserve(self._document, len(token_ids))
            return _read(self._document, token_ids, progress)

    def model_drafting_pays(self, target_tokens: int, draft_tokens: int) -> bool:
        cost = self._draft_cost(target_tokens, draft_tokens)
        tokens, value = 1.0, 0.0
        for length in range(1, LONGEST_DRAFT + 1):
            tokens += _EXPECTED_ACCEPTANCE**length
            value = max(value, tokens / (length * cost + 1))
        return value >= _LEAST_GAIN

    def generate(self, request: GenerateRequest, progress: ProgressFn | None = None) -> Generation:
        with self._turn:
            return self._begin(request, progress)

    def _begin(self, request: GenerateRequest, progress: ProgressFn | None) -> Generation:
        self._interrupt()
        target = self._document if request.reads == "document" else self._retrieved
        prompt = request.target_prompt
        answer = min(request.stop.max_new_tokens, _RESERVED_ANSWER) + MAX_DRAFT_TOKENS
        _reserve(target, len(prompt) + answer)
        for name, sequence in (("model", self._drafting), ("full", self._whole)):
            if name in request.drafters:
                _reserve(sequence, len(request.draft_prompt) + answer)
        drafters, controller = self._drafters(request)
        prefill_s, draft_prefill_s = self._read_prompts(target, request, drafters, progress)
        settings = DecodeSettings(request.warp, request.rule, controller)
        generator = torch.Generator().manual_seed(request.seed)
        rounds = self._while_latest(decode(target, prompt, drafters, settings, request.stop, generator), self._requests)
        self._answering = weakref.ref(rounds)
        return Generation(prefill_s, draft_prefill_s, rounds, controller.explain)

    # -- the document's cache as a whole --------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        return self._storable().model.fingerprint

    @property
    def dtype(self) -> str:
        model = self._storable().model
        # Packed weights fill the cache with slightly other numbers.
        return str(model.cache_dtype or model.model.dtype).removeprefix("torch.") + ("-packed" if model.packed else "")

    @property
    def token_ids(self) -> Sequence[int]:
        return self._document.token_ids

    @property
    def num_bytes(self) -> int:
        held = (self._document, self._drafting, self._retrieved, self._whole, self._streaming)
        sequences = {id(s): s for s in held}.values()
        return sum(s.cache.num_bytes for s in sequences if isinstance(s, HFSequence | StreamingSequence))

    @property
    def busy(self) -> bool:
        rounds = self._answering() if self._answering else None
        return rounds is not None and inspect.getgeneratorstate(rounds) != inspect.GEN_CLOSED

    def export(self, length: int) -> CacheState:
        with self._turn:
            sequence = self._storable()
            return CacheState(sequence.token_ids[:length], sequence.export(length))

    def restore(self, state: CacheState) -> None:
        with self._turn:
            self._interrupt()
            self._storable().restore(state.token_ids, state.tensors)

    def forget(self) -> None:
        self._stop_drafting_ahead()
        self._document = self._target_model.new_sequence()
        self._drafting = self._drafter_model.new_sequence()
        # The target reads a retrieved prompt only for method rag; with self-speculation the drafter just did.
        shared = self._drafter_model is self._target_model
        self._retrieved = self._drafting if shared else self._target_model.new_sequence()
        # The drafter's reading of the whole prompt, and the target's through a few tokens.
        self._whole = self._drafter_model.new_sequence()
        self._streaming: StreamingSequence | None = None

    def bytes_for(self, num_tokens: int) -> int:
        return self._target_model.step_bytes(num_tokens) - self._target_model.step_bytes(0)

    @property
    def _apart(self) -> bool:
        """Whether target and drafter compute on devices of their own, and so at the same time."""
        return _device(self._target_model) != _device(self._drafter_model)

    def _interrupt(self) -> None:
        """The caches are about to move: answers under way are over."""
        self._requests += 1
        self._stop_drafting_ahead()

    def _stop_drafting_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _storable(self) -> HFSequence:
        if not isinstance(self._document, HFSequence):
            raise ModelError(f"the cache of {self._target_model.name} cannot be saved; use a transformers model")
        return self._document

    def _read_prompts(
        self,
        target: TokenSequence,
        request: GenerateRequest,
        drafters: Mapping[str, Drafter],
        progress: ProgressFn | None,
    ) -> tuple[float, float]:
        """Seconds the target took to read its prompt, and seconds the drafters took longer. Models on different
        devices read at the same time."""
        prompt = request.target_prompt[:-1]
        start = time.perf_counter()
        # What copies from the target's cache has to wait for it.
        if self._apart and drafters and "streaming" not in request.drafters:
            with ThreadPoolExecutor(1) as pool:
                others = [pool.submit(drafter.start) for drafter in drafters.values()]
                prefill_s = _read(target, prompt, progress)
                for other in others:
                    other.result()
        else:
            prefill_s = _read(target, prompt, progress)
            if "full" in request.drafters:
                self._borrow(prompt)
            for drafter in drafters.values():
                drafter.start(progress)
        return prefill_s, time.perf_counter() - start - prefill_s

    def _borrow(self, prompt: Sequence[int]) -> None:
        """With shared weights the drafter's reading of the whole prompt is a copy of the target's."""
        source, whole = self._document, self._whole
        shared = self._drafter_model is self._target_model
        if shared and isinstance(source, HFSequence) and isinstance(whole, HFSequence):
            whole.restore(source.token_ids[: len(prompt)], source.export(len(prompt)))

    def _drafters(self, request: GenerateRequest) -> tuple[dict[str, Drafter], Controller]:
        """The drafters of an answer and what chooses among them: with a fixed length the first that has
        something to propose, lookups before the model."""
        made: dict[str, Drafter] = {}
        if "lookup" in request.drafters:
            # What short matches are worth is the governor's to judge.
            min_match = 1 if request.num_draft_tokens == "auto" else MIN_MATCH
            made["lookup"] = self._lookup_drafter(request.target_prompt, min_match)
        if "model" in request.drafters:
            made["model"] = self._model_drafter(self._drafting, request)
        if "full" in request.drafters:
            made["full"] = self._model_drafter(self._whole, request)
        if "streaming" in request.drafters:
            ends = self._target_model.eos_token_ids
            made["streaming"] = StreamingDrafter(self._streamed(*request.streaming), request.target_prompt, ends)
        if request.num_draft_tokens == "auto":
            return made, self._governed(request)
        if len(made) > 1:
            made = {"cascade": CascadeDrafter(made)}
        name = next(iter(made), None) if request.num_draft_tokens else None
        return ({name: made[name]} if name else {}), FixedDraft(name, request.num_draft_tokens)

    def _model_drafter(self, sequence: TokenSequence, request: GenerateRequest) -> Drafter:
        prompt, ends = request.draft_prompt, self._drafter_model.eos_token_ids
        if self._vocabularies is None:
            drafter = ModelDrafter(sequence, prompt, ends, min_draft_prob=request.min_draft_prob)
            if not self._apart:
                return drafter
            self._ahead = AheadDrafter(drafter)
            return self._ahead
        ours, theirs = self._vocabularies
        return RetokenizingDrafter(sequence, prompt, ends, draft_vocabulary=theirs, target_vocabulary=ours)

    def _streamed(self, sinks: int, recent: int) -> StreamingSequence:
        """The target's reading through a few tokens, kept between questions."""
        if not isinstance(self._document, HFSequence):
            raise ModelError(
                f"method magicdec copies from the target's cache, and {self._target_model.name} has none to copy; "
                "use a transformers model"
            )
        made = self._streaming
        if made is None or (made.sinks, made.recent) != (sinks, recent):
            made = self._streaming = StreamingSequence(self._document, sinks=sinks, recent=recent)
        return made

    def _governed(self, request: GenerateRequest) -> Governor:
        """A governor of these drafters, which knows what rounds cost here from earlier answers at such lengths.

        Each answer has a copy of its own, so that answers under way at the same time cannot disturb one another.
        """
        length = len(request.target_prompt)
        key = (request.drafters, length.bit_length())
        governor = copy.deepcopy(self._governors.get(key))
        if governor is None:
            seen = min(length, sum(request.streaming))
            steps = self._target_model.step_bytes
            guesses: dict[DrafterName, float] = {
                "lookup": 0.0,
                "model": self._draft_cost(length, len(request.draft_prompt)),
                "full": self._draft_cost(length, len(request.draft_prompt)),
                "streaming": steps(seen) / steps(length),
            }
            governor = Governor({name: guesses[name] for name in request.drafters})
        self._governors[key] = governor
        governor.next_answer()
        return governor

    def _draft_cost(self, target_tokens: int, draft_tokens: int) -> float:
        """A drafted token in steps of the target, by the memory each has to stream: weights and cache."""
        return self._drafter_model.step_bytes(draft_tokens) / self._target_model.step_bytes(target_tokens)

    def _lookup_drafter(self, prompt: Sequence[int], min_match: int = MIN_MATCH) -> LookupDrafter:
        """Follows the document through an index made at the first question, and once more at the second, when it
        shows where the document ends; what differs between questions is context."""
        ends = self._target_model.eos_token_ids
        if self._lookup is not None:
            known, index = self._lookup
            shared = shared_prefix(known, prompt)
            if 2 * shared >= len(known):
                if shared < len(known):
                    index = LookupIndex(prompt[:shared])
                    self._lookup = list(prompt[:shared]), index
                return LookupDrafter(index, ends, context=prompt[shared:], min_match=min_match)
        index = LookupIndex(prompt)
        self._lookup = list(prompt), index
        return LookupDrafter(index, ends, min_match=min_match)

    def _while_latest(self, rounds: Iterator[Round], number: int) -> Generator[Round, None, None]:
        """`rounds` of request `number`, until a later request moves the caches under them."""
        while True:
            with self._turn:
                if self._requests != number:
                    break
                if (round_ := next(rounds, None)) is None:
                    return
                if round_.finish_reason is not None:
                    self._answering = None
                    self._stop_drafting_ahead()
            yield round_
        raise RapidError(
            "this answer was left half way and another question was asked in its session; finish one answer before "
            "the next, or open a second session"
        )


def _device(model: LanguageModel) -> object:
    """Where the weights are; None for models that do not say."""
    return getattr(model, "device", None)


def _reserve(sequence: TokenSequence, length: int) -> None:
    """Room for `length` tokens, where the sequence allocates. Raises `ModelError` where there is no memory for it."""
    if isinstance(sequence, HFSequence):
        steps = sequence.model.step_bytes
        missing = steps(length) - steps(0) - sequence.cache.num_bytes
        if missing > 0:
            require_cache_memory(length, missing, str(sequence.model.device))
        sequence.reserve(length)


def _read(sequence: TokenSequence, token_ids: list[int], progress: ProgressFn | None) -> float:
    """Make `sequence` hold exactly `token_ids`, reusing the beginning it already holds; seconds it took."""
    start = time.perf_counter()
    keep = shared_prefix(sequence.token_ids, token_ids)
    sequence.rewind(keep)
    if keep < len(token_ids):
        sequence.prefill(token_ids[keep:], progress)
    return time.perf_counter() - start
