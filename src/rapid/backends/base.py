"""What an engine asks of whatever runs its models.

A backend holds a target and a drafter. A `Reader` is its state for one open document: what has been read stays
read, so that the next question about the document starts where the document ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rapid.decode.stop import StopRule
from rapid.models.base import ProgressFn
from rapid.params import STREAMING_SINKS, STREAMING_WINDOW
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import Warp
from rapid.types import Round

if TYPE_CHECKING:
    import torch

DrafterName = Literal["model", "lookup", "full", "streaming"]


@dataclass(frozen=True)
class ModelInfo:
    """What the engine needs to know of a loaded model. `tokenizer` is a transformers fast tokenizer."""

    name: str
    window: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_parameters: int
    tokenizer: Any


@dataclass(frozen=True)
class GenerateRequest:
    """One answer.

    reads             which prompt the verifying target reads: the document's or the retrieved one.
    drafters          `model` and `full` (read `draft_prompt`, retrieved or whole), `streaming` (the target's own
                      weights over its cache's ends) and `lookup` (follows the document's own text), in any
                      combination; none decodes plainly.
    streaming         tokens `streaming` sees: the first ones, the latest ones.
    min_draft_prob    a draft of `model` or `full` ends after a less probable token.
    num_draft_tokens  gamma; "auto" leaves drafter and gamma to the governor, round by round.
    """

    target_prompt: list[int]
    draft_prompt: list[int]
    reads: Literal["document", "retrieved"]
    drafters: tuple[DrafterName, ...]
    num_draft_tokens: int | Literal["auto"]
    warp: Warp
    rule: AcceptanceRule
    stop: StopRule
    seed: int
    streaming: tuple[int, int] = (STREAMING_SINKS, STREAMING_WINDOW)
    min_draft_prob: float = 0.0


@dataclass(frozen=True)
class Generation:
    """A started answer: seconds its two prompts took to read, the rounds to come, and (at any time) what the
    choice of drafter and draft length rests on."""

    prefill_s: float
    draft_prefill_s: float
    rounds: Iterator[Round]
    explain: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class CacheState:
    """What a target has read: the tokens and, by name, the tensors of its cache over them."""

    token_ids: list[int]
    tensors: Mapping[str, torch.Tensor]


class Reader(Protocol):
    """The state of one open document.

    fingerprint, dtype  equal for readers that can use each other's `CacheState`.
    token_ids           what the target has read of the document.
    num_bytes           memory of all its caches.
    busy                an answer is under way: the caches must stay where they are.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def busy(self) -> bool: ...

    def prefill(self, token_ids: list[int], progress: ProgressFn | None = None) -> float:
        """Read the beginning that all of the document's prompts share; returns seconds."""
        ...

    def model_drafting_pays(self, target_tokens: int, draft_tokens: int) -> bool:
        """Whether a good model drafter, reading `draft_tokens`, could make a governed answer clearly faster:
        only then is it worth retrieving for it and reading its prompt."""
        ...

    def generate(self, request: GenerateRequest, progress: ProgressFn | None = None) -> Generation:
        """Read what of the prompts is not read yet, then decode lazily."""
        ...

    def export(self, length: int) -> CacheState:
        """The first `length` tokens of the document's cache, as views: good until the next call. Raises
        `ModelError` where the target's cache cannot be saved."""
        ...

    def restore(self, state: CacheState) -> None:
        """Hold what `export` gave. Raises `ModelError` for what does not fit the target, and holds nothing then."""
        ...

    def forget(self) -> None:
        """Free all caches; what is needed of them is read again."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Memory the document's cache will take at `num_tokens`, about."""
        ...


class Backend(Protocol):
    """Loaded models."""

    target: ModelInfo
    drafter: ModelInfo

    @property
    def self_speculation(self) -> bool:
        """Whether target and drafter share their weights."""
        ...

    @property
    def vocabulary_difference(self) -> str | None:
        """The first token in which the drafter's vocabulary differs from the target's, in words; None: the same."""
        ...

    def open(self) -> Reader:
        """A reader that has read nothing yet."""
        ...
