"""What to load, and the settings of a request, validated once at construction; the only place where defaults live.

An unknown name is Python's own TypeError, a bad value is `InvalidParameter` with the way out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rapid.errors import InvalidParameter

Method = Literal["rapid", "sd", "lookup", "lc", "rag", "sd-full", "magicdec"]
Law = Literal["exact", "transfer", "paper"]
Ranking = Literal["dense", "bm25", "hybrid"]
IndexSource = Literal["target", "document"]
RetrievalSource = Literal["document", "unrelated", "oracle"]

METHODS: tuple[str, ...] = get_args(Method)
LAWS: tuple[str, ...] = get_args(Law)
RANKINGS: tuple[str, ...] = get_args(Ranking)
INDEX_SOURCES: tuple[str, ...] = get_args(IndexSource)
RETRIEVAL_SOURCES: tuple[str, ...] = get_args(RetrievalSource)

# The paper's settings: eta 10 when target and drafter share their weights, 40 for a larger drafter.
ETA_SELF = 10.0
ETA_LARGER_DRAFTER = 40.0
# The paper's gamma. What is lossy always drafts this many by default: a length chosen by the clock would make the
# text depend on it.
DRAFT_TOKENS_LOSSY = 10
# More than this many drafted tokens a round never paid in any published measurement, and costs memory.
MAX_DRAFT_TOKENS = 128
# MagicDec's StreamingLLM cache as the paper compares with it.
STREAMING_SINKS = 4
STREAMING_WINDOW = 4096

# A drafter that is the target with smaller weights, by name: bits of a weight.
QUANTISED_DRAFTERS = {"self:8bit": 8, "self:4bit": 4}


def drafter_bits(drafter: str) -> int | None:
    """Bits of a quantised copy of the target; None for another drafter. Raises `InvalidParameter` for a copy of a
    kind that is not there."""
    if drafter.startswith("self:") and drafter not in QUANTISED_DRAFTERS:
        raise InvalidParameter(f"drafter {drafter} is unknown; use self, {', '.join(QUANTISED_DRAFTERS)}, or a model")
    return QUANTISED_DRAFTERS.get(drafter)


@dataclass(frozen=True)
class Models:
    """What to load. `drafter` "self" shares the target's weights; "self:8bit" and "self:4bit" copy them quantised.
    `device` and `dtype` hold for both, but for what `drafter_device` and `drafter_dtype` overrule."""

    target: str = "embedded"
    drafter: str = "self"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    drafter_device: str | None = None
    drafter_dtype: str | None = None

    @property
    def drafter_source(self) -> str:
        """What the drafter's weights are loaded from: the target's, for `self` and its quantised copies."""
        return self.target if self.drafter == "self" or drafter_bits(self.drafter) else self.drafter


def _integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(f"{name} must be a whole number, got {value!r}")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise InvalidParameter(f"{name} must be {bounds}, got {value}")


def _number(name: str, value: Any, least: float, most: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < least or (most is not None and value > most):
        bounds = f"finite and at least {least:g}" if most is None else f"between {least:g} and {most:g}"
        raise InvalidParameter(f"{name} must be {bounds}, got {value}")


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidParameter(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _span(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise InvalidParameter(f"an oracle span is (document, start, end), got {value!r}")
    document, start, end = value
    _integer("document of an oracle span", document, 0)
    _integer("start of an oracle span", start, 0)
    _integer("end of an oracle span", end, start + 1)
    return document, start, end


@dataclass(frozen=True)
class Retrieval:
    """What the drafter reads.

    ranking         `dense` (embeddings), `bm25` (words), `hybrid` (both, reciprocal rank fusion).
    embedder        `embedded` (MiniLM from its package), or a sentence-transformers id or directory.
    chunk_tokens    longest passage, in target tokens (paper: 512).
    context_budget  retrieved tokens at most; None applies the paper's rule, scaled to the target's window.
    threshold       passages below this similarity are dropped; None takes the embedder's own default.
    index           `target`: index what the target reads; `document`: the whole document, also what a
                    middle cut hid from the target (as the released script does).
    source          where passages come from: `document`; to study what retrieval does, `unrelated` (another text,
                    as in the paper's ablation) or `oracle` (given places).
    unrelated       file of the other text; None takes the novel that comes with the package.
    oracle_spans    (document, start, end) of the given places: number of the document from 0, characters.
    """

    ranking: Ranking = "dense"
    embedder: str = "embedded"
    chunk_tokens: int = 512
    context_budget: int | None = None
    threshold: float | None = None
    index: IndexSource = "target"
    source: RetrievalSource = "document"
    unrelated: str | None = None
    oracle_spans: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        _choice("ranking", self.ranking, RANKINGS)
        _choice("index", self.index, INDEX_SOURCES)
        _integer("chunk_tokens", self.chunk_tokens, 16, 8192)
        if not isinstance(self.embedder, str) or not self.embedder.strip():
            raise InvalidParameter("embedder must be a name, got an empty one")
        if self.context_budget is not None:
            _integer("context_budget", self.context_budget, 1)
        if self.threshold is not None:
            _number("threshold", self.threshold, -1.0, 1.0)
            if self.ranking == "bm25":
                raise InvalidParameter(
                    "threshold is a cosine similarity and ranking bm25 has none; leave it out, or rank dense or hybrid"
                )
        _choice("source", self.source, RETRIEVAL_SOURCES)
        if self.unrelated is not None and self.source != "unrelated":
            raise InvalidParameter(f"an unrelated text is for source unrelated, got source {self.source}")
        object.__setattr__(self, "oracle_spans", tuple(_span(span) for span in self.oracle_spans))
        if bool(self.oracle_spans) != (self.source == "oracle"):
            raise InvalidParameter(
                f"source oracle and oracle_spans go together, got source {self.source} and "
                f"{len(self.oracle_spans)} spans"
            )


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted and accepted.

    method            `rapid` (RAG drafter, eta > 0, lossy), `sd` (the same drafter, eta 0, lossless),
                      `lookup` (drafts copied from the document's own text, no model, lossless),
                      `lc` (target alone on the long prompt), `rag` (target alone on the retrieved prompt),
                      `sd-full` (the drafter on the whole prompt, lossless), `magicdec` (the target's own weights
                      over a StreamingLLM cache of the whole prompt, lossless).
    eta               strength of the knowledge transfer (Eq. 6); None: 10, or 40 with a larger drafter.
    law               `paper` (the released rule), `transfer` (output follows the adjusted target),
                      `exact` (output follows the target: lossless, eta has no effect).
    alpha             the shift applies only where q >= alpha * max q.
    num_draft_tokens  gamma: tokens proposed per round; 0 drafts nothing. "auto": where the answer is lossless
                      the governor chooses it, and the drafter, round by round for speed (lossless `rapid` may
                      also look drafts up); where it is lossy, the paper's 10.
    streaming_sinks, streaming_window   what `magicdec` drafts from: the first tokens and the latest ones.
    min_draft_prob    a model's draft ends after a token it found less probable than this; 0: never. For lossless
                      answers only: where a draft ends decides which law a token follows.
    """

    method: Method = "rapid"
    eta: float | None = None
    law: Law = "paper"
    alpha: float = 0.1
    num_draft_tokens: int | Literal["auto"] = "auto"
    streaming_sinks: int = STREAMING_SINKS
    streaming_window: int = STREAMING_WINDOW
    min_draft_prob: float = 0.0

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("law", self.law, LAWS)
        _number("alpha", self.alpha, 0.0, 1.0)
        _integer("streaming_sinks", self.streaming_sinks, 0)
        _integer("streaming_window", self.streaming_window, 1)
        _number("min_draft_prob", self.min_draft_prob, 0.0, 1.0)
        if self.min_draft_prob > 0 and not self.lossless:
            raise InvalidParameter(
                f"min_draft_prob {self.min_draft_prob:g} changes what a lossy answer follows; use it with eta 0 or law "
                "exact (--lossless), or leave it out"
            )
        if self.num_draft_tokens != "auto":
            _integer("num_draft_tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.eta is not None:
            _number("eta", self.eta, 0.0)
            if self.method in ("sd", "lookup", "sd-full", "magicdec") and self.eta > 0:
                raise InvalidParameter(
                    f"method {self.method} is eta 0, got eta {self.eta:g}; use method rapid for a transfer"
                )

    @property
    def lossless(self) -> bool:
        """True where the output provably follows the target's own distribution on its prompt."""
        return self.method != "rapid" or self.law == "exact" or self.eta == 0


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and when to stop.

    temperature     0 is greedy.
    top_k, top_p, min_p   the usual filters; 0, 1 and 0 switch them off.
    seed            None draws a fresh one; the process-wide generator is never touched.
    max_new_tokens  exact upper limit of emitted tokens, at least 1.
    stop            strings (or one) that end the answer; they are not part of it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidParameter("top_p must be above 0; use temperature 0 for greedy decoding")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("max_new_tokens", self.max_new_tokens, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else tuple(given)
        if not all(isinstance(s, str) and s for s in stop):
            raise InvalidParameter("stop must hold non-empty strings")
        object.__setattr__(self, "stop", stop)
