"""What an engine asks of whatever runs its models.

A backend holds a target and a drafter. A `Reader` is its state for one open document: what has been read stays
read, so that the next question about the document starts where the document ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rapid.decode.loop import DecodeSettings
from rapid.decode.stop import StopRule
from rapid.models.base import ProgressFn
from rapid.types import Round


@dataclass(frozen=True)
class BackendSettings:
    """What to load. `drafter` "self" shares the target's weights; `device` and `dtype` hold for both."""

    target: str = "embedded"
    drafter: str = "self"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None


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
    """One answer. `reads` says which prompt the verifying target reads: the document's or the retrieved one.

    `draft_prompt` None decodes without a drafter.
    """

    target_prompt: list[int]
    draft_prompt: list[int] | None
    reads: Literal["document", "retrieved"]
    settings: DecodeSettings
    stop: StopRule
    seed: int


@dataclass(frozen=True)
class Generation:
    """A started answer: seconds its two prompts took to read, and the rounds to come."""

    prefill_s: float
    draft_prefill_s: float
    rounds: Iterator[Round]


class Reader(Protocol):
    """The state of one open document."""

    def prefill(self, token_ids: list[int], progress: ProgressFn | None = None) -> float:
        """Read the beginning that all of the document's prompts share; returns seconds."""
        ...

    def generate(self, request: GenerateRequest, progress: ProgressFn | None = None) -> Generation:
        """Read what of the prompts is not read yet, then decode lazily."""
        ...


class Backend(Protocol):
    """Loaded models."""

    target: ModelInfo
    drafter: ModelInfo

    @property
    def self_speculation(self) -> bool:
        """Whether target and drafter share their weights."""
        ...

    def open(self) -> Reader:
        """A reader that has read nothing yet."""
        ...
