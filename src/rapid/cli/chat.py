"""`rapid chat DOCUMENT...`: a conversation about documents that are read once."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rapid.cli import options
from rapid.cli.ask import figures, write_pieces
from rapid.cli.opening import Opening
from rapid.cli.progress import stage_progress
from rapid.errors import InvalidParameter, PromptTooLong, RapidError
from rapid.params import Retrieval, Sampling, Speculation

if TYPE_CHECKING:
    from rapid.answering import AnswerStream
    from rapid.session import Session

_SPECULATION, _SAMPLING, _RETRIEVAL = Speculation(), Sampling(), Retrieval()
# Answers of full length, questions included, that a document too long for the window leaves room for.
_TURNS = 4


def chat(
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOCUMENT...",
            help="Files (txt, md, html, pdf, docx); may be left out with a --session that exists.",
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
    context_budget: options.ContextBudget = None,
    session: options.Session = None,
) -> None:
    """Talk about the documents: each line of standard input is a question, and earlier turns are remembered.

    Answers go to stdout, figures and messages to stderr. The end of the input ends the conversation; on a terminal
    Ctrl-C stops an answer, or, between two, the conversation.
    """
    speculation = options.speculation(
        method, lossless, eta, law, alpha, num_draft_tokens, streaming_sinks, streaming_window, min_draft_prob
    )
    sampling = Sampling(temperature, top_k, top_p, min_p, seed, max_new_tokens)
    retrieval = Retrieval(ranking=cast(Any, ranking), embedder=embedder, context_budget=context_budget)
    if "-" in (documents or ()):
        raise InvalidParameter("chat takes its questions from standard input, so no document; name the file")
    opening = Opening(
        documents or [], session, retrieval, target, drafter, device, dtype, threads, drafter_device, drafter_dtype
    )
    opened = opening.open(
        lambda engine: min(_TURNS * max_new_tokens, engine.backend.target.window // 2), prefill=method != "rag"
    )
    conversation = Conversation(opened, speculation, sampling)
    status = max([_answer(conversation, question) for question in _questions()], default=0)
    if status and not sys.stdin.isatty():
        raise typer.Exit(status)


class Conversation:
    """Turns about one session. Where they grow too long for the window, the oldest are dropped, and a note says so."""

    def __init__(self, session: Session, speculation: Speculation, sampling: Sampling) -> None:
        self.history: list[tuple[str, str]] = []
        self._session = session
        self._speculation = speculation
        self._sampling = sampling
        self._noted: set[str] = set()

    def answer(self, question: str) -> None:
        """Write the answer to stdout. The turn is remembered once it is complete."""
        stream = self._stream(question)
        for warning in stream.warnings:
            if warning not in self._noted:
                self._noted.add(warning)
                sys.stderr.write(f"rapid: note: {warning}\n")
        write_pieces(stream)
        answer = stream.finish()
        self.history.append((question, answer.text))
        sys.stderr.write(figures(answer) + "\n")

    def _stream(self, question: str) -> AnswerStream:
        # "And when?" alone finds nothing: what was asked before says what it is about.
        query = "\n".join([*(asked for asked, _ in self.history[-1:]), question])
        history = list(self.history)
        while True:
            try:
                with stage_progress() as progress:
                    stream = self._session.stream(
                        question,
                        speculation=self._speculation,
                        sampling=self._sampling,
                        history=history,
                        query=query,
                        progress=progress,
                    )
                break
            except PromptTooLong:
                if not history:
                    raise
                del history[0]
        if dropped := len(self.history) - len(history):
            turns = "the oldest turn" if dropped == 1 else f"the oldest {dropped} turns"
            sys.stderr.write(f"rapid: note: {turns} of the conversation did not fit the window and will be forgotten\n")
            self.history = history
        return stream


def _answer(conversation: Conversation, question: str) -> int:
    """The status of one turn: a question that fails does not end the conversation, nor, at a terminal, does Ctrl-C."""
    try:
        conversation.answer(question)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except RapidError as error:
        sys.stderr.write(f"rapid: {error}\n")
        return error.exit_code
    return 0


def _questions() -> Iterator[str]:
    """The lines of standard input that are not blank, until it ends; on a terminal they are prompted for."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    lines = _typed() if sys.stdin.isatty() else sys.stdin
    yield from (line.strip() for line in lines if line.strip())


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its line editing
    try:
        while True:
            yield input("> ")
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n")
