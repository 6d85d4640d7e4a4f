"""The options that `rapid ask` and `rapid chat` share, each with its help text."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from rapid.errors import InvalidParameter
from rapid.params import STREAMING_SINKS, STREAMING_WINDOW, Speculation

Method = Annotated[
    str,
    typer.Option(
        help="rapid: RAG drafter with knowledge transfer (lossy for eta > 0). sd: the same drafter, lossless. "
        "lookup: drafts copied from the document, lossless. lc: the target alone on the whole document. "
        "rag: the target alone on the retrieved passages. sd-full: the drafter on the whole document, lossless. "
        "magicdec: the target's own weights over the beginning and the latest tokens of what it read, lossless."
    ),
]
Lossless = Annotated[bool, typer.Option("--lossless", help="Short for --eta 0 --law exact.")]
Eta = Annotated[
    float | None,
    typer.Option(
        help="Strength of the knowledge transfer; above 0 is lossy.  [default: 10, or 40 with a larger drafter]"
    ),
]
Law = Annotated[
    str,
    typer.Option(
        help="paper: the published rule, lossy. transfer: follows the adjusted target, lossy. exact: lossless."
    ),
]
Alpha = Annotated[float, typer.Option(help="Transfer only where q >= alpha * max q.")]
NumDraftTokens = Annotated[
    str,
    typer.Option(
        help="Tokens drafted per round (gamma), or auto: chosen round by round for speed where the answer is "
        "lossless, 10 as in the paper where it is lossy."
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best one.")]
MaxNewTokens = Annotated[int, typer.Option(help="Exact upper limit of the answer's tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the random draws.")]
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
DrafterDevice = Annotated[
    str | None,
    typer.Option(help="Where a drafter with weights of its own runs.  [default: as --device]", show_default=False),
]
DrafterDtype = Annotated[
    str | None,
    typer.Option(help="What a drafter with weights of its own runs in.  [default: as --dtype]", show_default=False),
]
MinDraftProb = Annotated[
    float, typer.Option(help="Lossless answers only: a model's draft ends after a token less probable than this.")
]
StreamingSinks = Annotated[int, typer.Option(help="magicdec: how many of the first tokens it reads.")]
StreamingWindow = Annotated[int, typer.Option(help="magicdec: how many of the latest tokens it reads.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or float32-packed (CPU only: weights packed to float16; faster, but near "
        "ties between tokens may fall otherwise)."
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.  [default: PyTorch's choice]", min=1)]
Ranking = Annotated[str, typer.Option(help="dense (embeddings), bm25 (words) or hybrid (both).")]
Embedder = Annotated[str, typer.Option(help="embedded (MiniLM), BAAI/bge-m3, or any sentence-transformers model.")]
ChunkTokens = Annotated[int, typer.Option(help="Longest passage, in target tokens.")]
ContextBudget = Annotated[
    int | None, typer.Option(help="Retrieved tokens at most.  [default: the paper's rule, scaled to the window]")
]
Threshold = Annotated[float | None, typer.Option(help="Drop passages below this similarity.  [default: by embedder]")]
Index = Annotated[
    str, typer.Option(help="target: retrieve from what the target reads. document: also from what a cut hid.")
]
RetrievalSource = Annotated[
    str,
    typer.Option(
        "--retrieval",
        help="document: retrieve from the documents. To study retrieval: unrelated (passages of another text) or "
        "oracle (given places).",
    ),
]
Unrelated = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="The other text for --retrieval unrelated.  [default: a novel]", show_default=False
    ),
]
OracleSpan = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[DOCUMENT:]START:END",
        help="A place for --retrieval oracle, in characters; documents count from 0. May be repeated.",
        show_default=False,
    ),
]
Session = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Keep the documents as read in FILE: made if it is not there, else used instead of reading them again. "
        "A FILE that does not fit the documents or the model is made anew.",
    ),
]


def speculation(
    method: str,
    lossless: bool,
    eta: float | None,
    law: str,
    alpha: float,
    num_draft_tokens: str,
    streaming_sinks: int = STREAMING_SINKS,
    streaming_window: int = STREAMING_WINDOW,
    min_draft_prob: float = 0.0,
) -> Speculation:
    """The setting behind the options of these names."""
    if lossless and eta:
        raise InvalidParameter(f"--lossless is short for --eta 0, got --eta {eta:g}; leave one of them out")
    try:
        length = num_draft_tokens if num_draft_tokens == "auto" else int(num_draft_tokens)
    except ValueError:
        raise InvalidParameter(f"--num-draft-tokens must be a whole number or auto, got {num_draft_tokens!r}") from None
    return Speculation(
        cast(Any, method),
        0.0 if lossless else eta,
        cast(Any, "exact" if lossless else law),
        alpha,
        cast(Any, length),
        streaming_sinks,
        streaming_window,
        min_draft_prob,
    )


def oracle_spans(given: list[str] | None) -> tuple[tuple[int, int, int], ...]:
    """The places behind --oracle-span: (document, start, end)."""
    spans = []
    for text in given or ():
        parts = text.split(":")
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3):
            raise InvalidParameter(f"--oracle-span must be [DOCUMENT:]START:END, got {text!r}")
        start, end = numbers[-2:]
        spans.append((numbers[0] if len(numbers) == 3 else 0, start, end))
    return tuple(spans)
