"""`rapid ask QUESTION DOCUMENT...`: one question, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rapid.cli import options
from rapid.cli.grouping import grouped
from rapid.cli.opening import Opening
from rapid.cli.progress import stage_progress
from rapid.errors import InvalidParameter
from rapid.params import Retrieval, Sampling, Speculation

if TYPE_CHECKING:
    from rapid.answering import AnswerStream
    from rapid.engine import Engine
    from rapid.session import Session
    from rapid.types import Answer


@grouped
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
    *,
    speculating: options.SpeculationOptions,
    sampled: options.SamplingOptions,
    loading: options.PairOptions,
    retrieving: options.RetrievalOptions,
    source: Annotated[
        str,
        typer.Option(
            "--retrieval",
            help="document: retrieve from the documents. To study retrieval: unrelated (passages of another text) or "
            "oracle (given places).",
        ),
    ] = Retrieval.source,
    unrelated: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The other text for --retrieval unrelated.  [default: a novel]", show_default=False
        ),
    ] = None,
    oracle_span: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DOCUMENT:]START:END",
            help="A place for --retrieval oracle, in characters; documents count from 0. May be repeated.",
            show_default=False,
        ),
    ] = None,
    session: options.Session = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with answer, usage and figures.")
    ] = False,
) -> None:
    """Answer QUESTION about the documents. The answer goes to stdout, figures and messages to stderr."""
    speculation, sampling = speculating.speculation(), sampled.sampling()
    retrieval = retrieving.retrieval(source=source, unrelated=unrelated, oracle_spans=_oracle_spans(oracle_span))
    opened = _open(Opening(documents or [], session, retrieval, loading.models()), question, speculation, sampling)
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


def _oracle_spans(given: list[str] | None) -> tuple[tuple[int, int, int], ...]:
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
