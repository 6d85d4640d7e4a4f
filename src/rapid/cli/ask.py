"""`rapid ask QUESTION DOCUMENT...`: one question, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rapid.cli import options
from rapid.cli.opening import Opening
from rapid.cli.progress import stage_progress
from rapid.errors import InvalidParameter
from rapid.params import Ranking, Retrieval, Sampling, Speculation

if TYPE_CHECKING:
    from rapid.answering import AnswerStream
    from rapid.engine import Engine
    from rapid.session import Session
    from rapid.types import Answer

_SPECULATION, _SAMPLING, _RETRIEVAL = Speculation(), Sampling(), Retrieval()


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.", show_default=False)],
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOCUMENT...",
            help="Files (txt, md, html, pdf, docx), or - for stdin; may be left out with a --session that exists.",
            show_default=False,
        ),
    ] = None,
    method: options.Method = _SPECULATION.method,
    lossless: options.Lossless = False,
    eta: options.Eta = None,
    law: options.Law = _SPECULATION.law,
    alpha: options.Alpha = _SPECULATION.alpha,
    num_draft_tokens: options.NumDraftTokens = "auto",
    temperature: options.Temperature = _SAMPLING.temperature,
    top_k: options.TopK = _SAMPLING.top_k,
    top_p: options.TopP = _SAMPLING.top_p,
    min_p: options.MinP = _SAMPLING.min_p,
    max_new_tokens: options.MaxNewTokens = _SAMPLING.max_new_tokens,
    stop: options.Stop = None,
    seed: options.Seed = None,
    target: options.Target = "embedded",
    drafter: options.Drafter = "self",
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    drafter_device: options.DrafterDevice = None,
    drafter_dtype: options.DrafterDtype = None,
    threads: options.Threads = None,
    streaming_sinks: options.StreamingSinks = _SPECULATION.streaming_sinks,
    streaming_window: options.StreamingWindow = _SPECULATION.streaming_window,
    min_draft_prob: options.MinDraftProb = _SPECULATION.min_draft_prob,
    ranking: options.Ranking = _RETRIEVAL.ranking,
    embedder: options.Embedder = _RETRIEVAL.embedder,
    chunk_tokens: options.ChunkTokens = _RETRIEVAL.chunk_tokens,
    context_budget: options.ContextBudget = None,
    threshold: options.Threshold = None,
    index: options.Index = _RETRIEVAL.index,
    source: options.RetrievalSource = _RETRIEVAL.source,
    unrelated: options.Unrelated = None,
    oracle_span: options.OracleSpan = None,
    session: options.Session = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with answer, usage and figures.")
    ] = False,
) -> None:
    """Answer QUESTION about the documents. The answer goes to stdout, figures and messages to stderr."""
    speculation = options.speculation(
        method, lossless, eta, law, alpha, num_draft_tokens, streaming_sinks, streaming_window, min_draft_prob
    )
    sampling = Sampling(temperature, top_k, top_p, min_p, seed, max_new_tokens, tuple(stop or ()))
    retrieval = Retrieval(
        cast(Ranking, ranking),
        embedder,
        chunk_tokens,
        context_budget,
        threshold,
        cast(Any, index),
        cast(Any, source),
        unrelated,
        options.oracle_spans(oracle_span),
    )
    opening = Opening(
        documents or [], session, retrieval, target, drafter, device, dtype, threads, drafter_device, drafter_dtype
    )
    opened = _open(opening, question, speculation, sampling)
    with stage_progress() as progress:
        stream = opened.stream(question, speculation=speculation, sampling=sampling, progress=progress)
    for warning in stream.warnings:
        sys.stderr.write(f"rapid: note: {warning}\n")
    if not as_json:
        write_pieces(stream)
    answer = stream.finish()
    if as_json:
        sys.stdout.write(json.dumps(report(answer, opened), ensure_ascii=False) + "\n")
    else:
        sys.stderr.write(figures(answer) + "\n")


def write_pieces(stream: AnswerStream) -> None:
    """The answer on stdout as it comes, ended by a line end even when it is interrupted."""
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _open(opening: Opening, question: str, speculation: Speculation, sampling: Sampling) -> Session:
    from rapid.documents.text import without_surrogates

    if not question.strip():
        raise InvalidParameter("the question is empty; ask something about the document")
    asked = without_surrogates(question)

    def reserve(engine: Engine) -> int:
        engine.resolve(speculation)  # what these models cannot do is refused before they read the document
        return engine.target_prompter.count(asked) + sampling.max_new_tokens + SEAM_TOKENS

    return opening.open(reserve, prefill=speculation.method != "rag")


# A question tokenizes a little differently alone than beside the template's words.
SEAM_TOKENS = 4


def report(answer: Answer, session: Session) -> dict[str, Any]:
    """The JSON contract of docs/cli.md."""
    stats = answer.stats
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "method": answer.method,
        "settings": answer.settings,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "draft_prompt_tokens": answer.draft_prompt_tokens,
            "completion_tokens": stats.completion_tokens,
        },
        "stats": {
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "load_s": stats.load_s,
            "retrieval_s": stats.retrieval_s,
            "prefill_s": stats.prefill_s,
            "draft_prefill_s": stats.draft_prefill_s,
            "decode_s": stats.decode_s,
            "draft_s": stats.draft_s,
            "verify_s": stats.verify_s,
            "other_s": stats.other_s,
            "decode_tokens_per_s": stats.decode_tokens_per_s,
            "ttft_s": stats.ttft_s,
        },
        "retrieved": [
            {
                "document": session.sources[found.chunk.document].name,
                "start": found.chunk.start,
                "end": found.chunk.end,
                "score": found.score,
            }
            for found in answer.retrieved
        ],
        "governor": stats.governor,
        "warnings": answer.warnings,
    }


def figures(answer: Answer) -> str:
    """One line on what it took."""
    stats = answer.stats
    parts = [f"{stats.completion_tokens} tokens", f"{stats.decode_tokens_per_s:.1f} tokens/s"]
    if stats.drafted:
        parts.append(f"acceptance {stats.acceptance_rate:.2f} ({stats.accepted}/{stats.drafted} drafted)")
    if answer.retrieved:
        chunks = "1 chunk" if len(answer.retrieved) == 1 else f"{len(answer.retrieved)} chunks"
        parts.append(f"{chunks} retrieved ({answer.draft_prompt_tokens or answer.prompt_tokens} tokens)")
    parts.append(f"first token after {stats.ttft_s:.1f} s")
    return f"[{answer.method}] " + ", ".join(parts)
