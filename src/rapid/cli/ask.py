"""`rapid ask QUESTION DOCUMENT...`: one question, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rapid.cli.progress import stage_progress
from rapid.params import Law, Method, Ranking, Retrieval, Sampling, Speculation

if TYPE_CHECKING:
    from rapid.session import Session
    from rapid.types import Answer

_DEFAULTS = (Speculation(), Sampling(), Retrieval())
_SPECULATION, _SAMPLING, _RETRIEVAL = _DEFAULTS


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.", show_default=False)],
    documents: Annotated[
        list[str],
        typer.Argument(
            metavar="DOCUMENT...", help="Files (txt, md, html, pdf, docx), or - for stdin.", show_default=False
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="rapid: RAG drafter with knowledge transfer (lossy for eta > 0). sd: the same drafter, lossless. "
            "lc: the target alone on the whole document. rag: the target alone on the retrieved passages."
        ),
    ] = _SPECULATION.method,
    lossless: Annotated[bool, typer.Option("--lossless", help="Short for --eta 0 --law exact.")] = False,
    eta: Annotated[
        float | None,
        typer.Option(
            help="Strength of the knowledge transfer; above 0 is lossy.  [default: 10, or 40 with a larger drafter]"
        ),
    ] = None,
    law: Annotated[
        str,
        typer.Option(
            help="paper: the published rule, lossy. transfer: follows the adjusted target, lossy. exact: lossless."
        ),
    ] = _SPECULATION.law,
    alpha: Annotated[float, typer.Option(help="Transfer only where q >= alpha * max q.")] = _SPECULATION.alpha,
    num_draft_tokens: Annotated[
        int, typer.Option(help="Tokens drafted per round (gamma).")
    ] = _SPECULATION.num_draft_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _SAMPLING.temperature,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = _SAMPLING.top_k,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass.")] = _SAMPLING.top_p,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one.")] = _SAMPLING.min_p,
    max_new_tokens: Annotated[
        int, typer.Option(help="Exact upper limit of the answer's tokens.")
    ] = _SAMPLING.max_new_tokens,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws.")] = None,
    target: Annotated[
        str, typer.Option(help="embedded, a hub id, a directory, or a .gguf file (see `rapid models`).")
    ] = "embedded",
    drafter: Annotated[str, typer.Option(help="self (the target's own weights), or a model as for --target.")] = "self",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads.  [default: PyTorch's choice]", min=1)] = None,
    ranking: Annotated[
        str, typer.Option(help="dense (embeddings), bm25 (words) or hybrid (both).")
    ] = _RETRIEVAL.ranking,
    embedder: Annotated[
        str, typer.Option(help="embedded (MiniLM), BAAI/bge-m3, or any sentence-transformers model.")
    ] = _RETRIEVAL.embedder,
    chunk_tokens: Annotated[int, typer.Option(help="Longest passage, in target tokens.")] = _RETRIEVAL.chunk_tokens,
    context_budget: Annotated[
        int | None, typer.Option(help="Retrieved tokens at most.  [default: the paper's rule, scaled to the window]")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Drop passages below this similarity.  [default: by embedder]")
    ] = None,
    index: Annotated[
        str, typer.Option(help="target: retrieve from what the target reads. document: also from what a cut hid.")
    ] = _RETRIEVAL.index,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with answer, usage and figures.")
    ] = False,
) -> None:
    """Answer QUESTION about the documents. The answer goes to stdout, figures and messages to stderr."""
    speculation = Speculation(
        cast(Method, method), 0.0 if lossless else eta, cast(Law, "exact" if lossless else law), alpha, num_draft_tokens
    )
    sampling = Sampling(temperature, top_k, top_p, min_p, seed, max_new_tokens, tuple(stop or ()))
    retrieval = Retrieval(cast(Ranking, ranking), embedder, chunk_tokens, context_budget, threshold, cast(Any, index))
    session = _open(question, documents, method, sampling, retrieval, target, drafter, device, dtype, threads)
    with stage_progress() as progress:
        stream = session.stream(question, speculation=speculation, sampling=sampling, progress=progress)
    for warning in stream.warnings:
        sys.stderr.write(f"rapid: note: {warning}\n")
    if not as_json:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    answer = stream.finish()
    if as_json:
        sys.stdout.write(json.dumps(report(answer, session), ensure_ascii=False) + "\n")
    else:
        sys.stdout.flush()
        sys.stderr.write(figures(answer) + "\n")


def _open(
    question: str,
    documents: list[str],
    method: str,
    sampling: Sampling,
    retrieval: Retrieval,
    target: str,
    drafter: str,
    device: str,
    dtype: str,
    threads: int | None,
) -> Session:
    """Check all that needs no model, then load the models and read the documents."""
    from rapid.documents import read_documents
    from rapid.errors import InvalidParameter
    from rapid.models.sources import resolve

    if not question.strip():
        raise InvalidParameter("the question is empty; ask something about the document")
    for name in (target, drafter):
        if name != "self":
            resolve(name)
    texts = read_documents(documents)

    from rapid.engine import Engine

    with stage_progress() as progress:
        engine = Engine.load(target, drafter, device=device, dtype=dtype, threads=threads, progress=progress)
        return engine.open(
            texts,
            retrieval=retrieval,
            reserve_tokens=engine.target_prompter.count(question) + sampling.max_new_tokens + SEAM_TOKENS,
            prefill=method != "rag",
            progress=progress,
        )


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
                "document": session.documents[found.chunk.document].name,
                "start": found.chunk.start,
                "end": found.chunk.end,
                "score": found.score,
            }
            for found in answer.retrieved
        ],
        "warnings": answer.warnings,
    }


def figures(answer: Answer) -> str:
    """One line on what it took."""
    stats = answer.stats
    parts = [f"{stats.completion_tokens} tokens", f"{stats.decode_tokens_per_s:.1f} tokens/s"]
    if stats.drafted:
        parts.append(f"acceptance {stats.acceptance_rate:.2f} ({stats.accepted}/{stats.drafted} drafted)")
    if answer.retrieved:
        parts.append(
            f"{len(answer.retrieved)} chunks retrieved ({answer.draft_prompt_tokens or answer.prompt_tokens} tokens)"
        )
    parts.append(f"first token after {stats.ttft_s:.1f} s")
    return f"[{answer.method}] " + ", ".join(parts)
