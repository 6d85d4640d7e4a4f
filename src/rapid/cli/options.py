"""The options that commands share, each with its help text, in groups that are settings (see grouping.py)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import typer

from rapid.errors import InvalidParameter
from rapid.params import Models, Retrieval, Sampling, Speculation

_SPECULATION, _SAMPLING, _RETRIEVAL, _MODELS = Speculation(), Sampling(), Retrieval(), Models()

Target = Annotated[str, typer.Option(help="embedded, a hub id, a directory, or a .gguf file (see `rapid models`).")]
Drafter = Annotated[
    str,
    typer.Option(
        help="self: the target's own weights, one copy; pays from about 32K tokens on a GPU (the paper: 2.0x at 128K), "
        "on a CPU where answers quote the document. A larger model than the target, as for --target: for quality, not "
        "speed (the paper: 8B with a 70B drafter 39.3 -> 50.0 on InfiniteBench, at 1.14x). A smaller one: for speed. "
        "One with another tokenizer drafts losslessly only (--lossless, or --method sd). self:8bit, self:4bit: a "
        "quantised copy of the target's weights, for GPUs with long documents; on a CPU it does not pay (8 bits, two "
        "texts of 1.3K tokens: the same drafts accepted as of self, each drafted at a third of the speed or less)."
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass.")]
Ranking = Annotated[str, typer.Option(help="dense (embeddings), bm25 (words) or hybrid (both).")]
Embedder = Annotated[str, typer.Option(help="embedded (MiniLM), BAAI/bge-m3, or any sentence-transformers model.")]
ChunkTokens = Annotated[int, typer.Option(help="Longest passage, in target tokens.")]
Session = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Keep the documents as read in FILE: made if it is not there, else used instead of reading them again. "
        "A FILE that does not fit the documents or the model is made anew.",
    ),
]


@dataclass(frozen=True)
class SpeculationOptions:
    """How answers are decoded."""

    method: Annotated[
        str,
        typer.Option(
            help="rapid: RAG drafter with knowledge transfer (lossy for eta > 0). sd: the same drafter, lossless. "
            "lookup: drafts copied from the document, lossless. lc: the target alone on the whole document. "
            "rag: the target alone on the retrieved passages. sd-full: the drafter on the whole document, lossless. "
            "magicdec: the target's own weights over the beginning and the latest tokens of what it read, lossless."
        ),
    ] = _SPECULATION.method
    lossless: Annotated[bool, typer.Option("--lossless", help="Short for --eta 0 --law exact.")] = False
    eta: Annotated[
        float | None,
        typer.Option(
            help="Strength of the knowledge transfer; above 0 is lossy.  [default: 10, or 40 with a larger drafter]"
        ),
    ] = None
    law: Annotated[
        str,
        typer.Option(
            help="paper: the published rule, lossy. transfer: follows the adjusted target, lossy. exact: lossless."
        ),
    ] = _SPECULATION.law
    alpha: Annotated[float, typer.Option(help="Transfer only where q >= alpha * max q.")] = _SPECULATION.alpha
    num_draft_tokens: Annotated[
        str,
        typer.Option(
            help="Tokens drafted per round (gamma), or auto: chosen round by round for speed where the answer is "
            "lossless, 10 as in the paper where it is lossy."
        ),
    ] = "auto"
    streaming_sinks: Annotated[int, typer.Option(help="magicdec: how many of the first tokens it reads.")] = (
        _SPECULATION.streaming_sinks
    )
    streaming_window: Annotated[int, typer.Option(help="magicdec: how many of the latest tokens it reads.")] = (
        _SPECULATION.streaming_window
    )
    min_draft_prob: Annotated[
        float, typer.Option(help="Lossless answers only: a model's draft ends after a token less probable than this.")
    ] = _SPECULATION.min_draft_prob

    def speculation(self) -> Speculation:
        """The setting. Raises `InvalidParameter`."""
        if self.lossless and self.eta:
            raise InvalidParameter(f"--lossless is short for --eta 0, got --eta {self.eta:g}; leave one of them out")
        return Speculation(
            cast(Any, self.method),
            0.0 if self.lossless else self.eta,
            cast(Any, "exact" if self.lossless else self.law),
            self.alpha,
            cast(Any, _whole_number_or_auto(self.num_draft_tokens)),
            self.streaming_sinks,
            self.streaming_window,
            self.min_draft_prob,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """Which tokens are drawn, and when an answer ends."""

    temperature: Temperature = _SAMPLING.temperature
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = _SAMPLING.top_k
    top_p: TopP = _SAMPLING.top_p
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one.")] = _SAMPLING.min_p
    max_new_tokens: Annotated[int, typer.Option(help="Exact upper limit of the answer's tokens.")] = (
        _SAMPLING.max_new_tokens
    )
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws.")] = None

    def sampling(self) -> Sampling:
        """The setting. Raises `InvalidParameter`."""
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.max_new_tokens,
            tuple(self.stop or ()),
        )


@dataclass(frozen=True)
class ModelOptions:
    """What is loaded, both models alike."""

    target: Target = _MODELS.target
    drafter: Drafter = _MODELS.drafter
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = _MODELS.device
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, float16, or float32-packed (CPU only: weights packed to float16; faster, but near "
            "ties between tokens may fall otherwise)."
        ),
    ] = _MODELS.dtype
    threads: Annotated[int | None, typer.Option(help="CPU threads.  [default: PyTorch's choice]", min=1)] = None

    def models(self) -> Models:
        """The models. One that is named and cannot be found is a `ModelError` now, before anything is loaded."""
        from rapid.models.sources import resolve

        models = Models(**asdict(self))
        resolve(models.target)
        resolve(models.drafter_source)
        return models


@dataclass(frozen=True)
class PairOptions(ModelOptions):
    """What is loaded, and where the drafter is something else."""

    drafter_device: Annotated[
        str | None,
        typer.Option(help="Where a drafter with weights of its own runs.  [default: as --device]", show_default=False),
    ] = None
    drafter_dtype: Annotated[
        str | None,
        typer.Option(help="What a drafter with weights of its own runs in.  [default: as --dtype]", show_default=False),
    ] = None


@dataclass(frozen=True)
class RetrievalOptions:
    """What the drafter reads of the documents."""

    ranking: Ranking = _RETRIEVAL.ranking
    embedder: Embedder = _RETRIEVAL.embedder
    chunk_tokens: ChunkTokens = _RETRIEVAL.chunk_tokens
    context_budget: Annotated[
        int | None, typer.Option(help="Retrieved tokens at most.  [default: the paper's rule, scaled to the window]")
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="Drop passages below this similarity.  [default: by embedder]")
    ] = None
    index: Annotated[
        str, typer.Option(help="target: retrieve from what the target reads. document: also from what a cut hid.")
    ] = _RETRIEVAL.index

    def retrieval(self, **further: Any) -> Retrieval:
        """The setting, with what a command adds. Raises `InvalidParameter`."""
        return Retrieval(**asdict(self), **further)


def _whole_number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise InvalidParameter(f"--num-draft-tokens must be a whole number or auto, got {text!r}") from None
