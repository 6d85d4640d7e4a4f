"""`rapid chat DOCUMENT...`: a conversation about documents that are read once."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from rapid.cli import options
from rapid.cli.ask import figures, write_pieces
from rapid.cli.grouping import grouped
from rapid.cli.opening import Opening
from rapid.cli.progress import stage_progress
from rapid.errors import InvalidParameter, PromptTooLong, RapidError

if TYPE_CHECKING:
    from rapid.answering import AnswerStream
    from rapid.params import Sampling, Speculation
    from rapid.session import Session

# Answers of full length, questions included, that a document too long for the window leaves room for.
_TURNS = 4


@grouped
def chat(
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOCUMENT...",
            help="Files (txt, md, html, pdf, docx); may be left out with a --session that exists.",
            show_default=False,
        ),
    ] = None,
    *,
    speculating: options.SpeculationOptions,
    sampled: options.SamplingOptions,
    loading: options.PairOptions,
    retrieving: options.RetrievalOptions,
    session: options.Session = None,
) -> None:
    """Talk about the documents: each line of standard input is a question, and earlier turns are remembered.

    Answers go to stdout, figures and messages to stderr. The end of the input ends the conversation; on a terminal
    Ctrl-C stops an answer, or, between two, the conversation.
    """
    speculation, sampling = speculating.speculation(), sampled.sampling()
    if "-" in (documents or ()):
        raise InvalidParameter("chat takes its questions from standard input, so no document; name the file")
    opened = Opening(documents or [], session, retrieving.retrieval(), loading.models()).open(
        lambda engine: min(_TURNS * sampling.max_new_tokens, engine.backend.target.window // 2),
        prefill=speculation.method != "rag",
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
