"""A session: opened documents, ready for questions.

The way of one question: retrieve -> write two prompts from one template -> draft, verify, accept -> text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rapid.answering import AnswerStream
from rapid.backends.base import GenerateRequest
from rapid.context import as_documents, in_documents, join, visible_pieces
from rapid.decode.loop import DecodeSettings
from rapid.decode.stop import StopRule
from rapid.errors import InvalidParameter, PromptTooLong
from rapid.params import ETA_LARGER_DRAFTER, ETA_SELF, Retrieval, Sampling, Speculation
from rapid.prompt import Prompter, Template
from rapid.retrieval.index import Index
from rapid.retrieval.select import context_budget, join_chunks
from rapid.sampling.verify import AcceptanceRule
from rapid.sampling.warp import TokenWarp
from rapid.textstream import TextStream
from rapid.types import Answer, Document, ScoredChunk, Stats

if TYPE_CHECKING:
    from rapid.engine import Engine
    from rapid.models.base import ProgressFn
    from rapid.types import StageProgress

Turns = Sequence[tuple[str, str]]


class Session:
    """Documents one engine has opened. Made by `Engine.open`.

    `warnings` says what a user should know of how the documents were read (a cut in the middle, for one).
    """

    def __init__(
        self,
        engine: Engine,
        documents: Sequence[Document],
        *,
        retrieval: Retrieval,
        reserve_tokens: int,
        template: Template,
    ) -> None:
        self.engine = engine
        self.documents = list(documents)
        self.retrieval = retrieval
        self.template = template
        self.warnings: list[str] = []
        self._prompter = engine.target_prompter
        self._reader = engine.backend.open()
        cut = self._cut_to_fit(reserve_tokens)
        self._pieces = visible_pieces(self.documents, cut if retrieval.index == "target" else None)
        self._index: Index | None = None
        # Seconds spent before the first question, charged to it: it could not have been answered sooner.
        self._unreported = Stats(load_s=engine.take_load_seconds())

    # -- questions ------------------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        speculation: Speculation | None = None,
        sampling: Sampling | None = None,
        history: Turns = (),
        query: str | None = None,
        progress: StageProgress | None = None,
    ) -> Answer:
        """Answer a question; `stream` says what the arguments mean and what is raised."""
        return self.stream(
            question, speculation=speculation, sampling=sampling, history=history, query=query, progress=progress
        ).finish()

    def stream(
        self,
        question: str,
        *,
        speculation: Speculation | None = None,
        sampling: Sampling | None = None,
        history: Turns = (),
        query: str | None = None,
        progress: StageProgress | None = None,
    ) -> AnswerStream:
        """Answer a question piece by piece, as tokens are accepted.

        history  earlier (question, answer) turns of this conversation.
        query    what to retrieve by; the question itself unless given.
        Raises `InvalidParameter` for an empty question and `PromptTooLong` where question and answer do not fit
        beside the document.
        """
        asked = time.perf_counter()
        speculation, sampling = speculation or Speculation(), sampling or Sampling()
        if not question.strip():
            raise InvalidParameter("the question is empty; ask something about the document")
        stats, self._unreported = self._unreported, Stats()
        asked -= stats.load_s + stats.prefill_s

        found: list[ScoredChunk] = []
        warnings = list(self.warnings)
        if speculation.method != "lc":
            start = time.perf_counter()
            found, notes = self._retrieve(query or question, question, history, sampling, progress)
            stats.retrieval_s = time.perf_counter() - start
            warnings += notes
        target_prompt, draft_prompt = self._prompts(question, history, found, speculation)
        self._require_room(target_prompt, sampling)

        eta = self._eta(speculation)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        text = TextStream(self._prompter.decode, sampling.stop)
        request = GenerateRequest(
            target_prompt=target_prompt,
            draft_prompt=draft_prompt,
            reads="retrieved" if speculation.method == "rag" else "document",
            settings=DecodeSettings(
                warp=TokenWarp(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
                rule=AcceptanceRule(speculation.law if eta else "exact", eta, speculation.alpha),
                num_draft_tokens=speculation.num_draft_tokens,
            ),
            stop=StopRule(
                sampling.max_new_tokens,
                self.engine.backend.target.eos_token_ids,
                lambda ids: text.push(ids[-1]),
            ),
            seed=seed,
        )
        generation = self._reader.generate(request, stage(progress, "Reading the prompts"))
        stats.prefill_s += generation.prefill_s
        stats.draft_prefill_s = generation.draft_prefill_s
        unfinished = Answer(
            text="",
            token_ids=[],
            finish_reason="length",
            method=speculation.method,
            settings=self._settings(speculation, sampling, eta, seed),
            prompt_tokens=len(target_prompt),
            draft_prompt_tokens=len(draft_prompt or ()),
            stats=stats,
            retrieved=found,
            warnings=warnings,
        )
        return AnswerStream(generation.rounds, request.stop, text, unfinished, asked)

    # -- what the models read -------------------------------------------------------------------------------

    def prefill(self, progress: StageProgress | None = None) -> None:
        """Have the target read the documents now, instead of at the first question."""
        ids = self._target_prompt("", ())
        self._unreported.prefill_s += self._reader.prefill(ids, stage(progress, "Reading the document"))

    def _prompts(
        self, question: str, history: Turns, found: list[ScoredChunk], speculation: Speculation
    ) -> tuple[list[int], list[int] | None]:
        """(what the verifying target reads, what the drafter reads, if there is one)."""
        if speculation.method == "rag":
            return self._retrieved_prompt(self._prompter, question, history, found), None
        target_prompt = self._target_prompt(question, history)
        if speculation.method == "lc" or speculation.num_draft_tokens == 0:
            return target_prompt, None
        return target_prompt, self._retrieved_prompt(self.engine.draft_prompter, question, history, found)

    def _target_prompt(self, question: str, history: Turns) -> list[int]:
        return self._prompter.encode(self.context, question, retrieved=False, history=history, template=self.template)

    def _retrieved_prompt(
        self, prompter: Prompter, question: str, history: Turns, found: list[ScoredChunk]
    ) -> list[int]:
        passages = join_chunks([f.chunk for f in found])
        return prompter.encode(passages, question, retrieved=True, history=history, template=self.template)

    def _cut_to_fit(self, reserve_tokens: int) -> tuple[int, int] | None:
        """Set `context`, cut in the middle so that `reserve_tokens` stay free in the window; the cut, if any."""
        window = self.engine.backend.target.window
        whole = join(self.documents)
        self.context = whole
        excess = len(self._target_prompt("", ())) + reserve_tokens - window
        self._context_tokens = total = self._prompter.count(whole)
        if excess <= 0:
            return None
        keep, cut = total, (0, 0)
        # Tokens on both sides of the seam may join differently: cut again until it fits.
        while excess > 0:
            keep -= excess
            if keep <= 0:
                raise PromptTooLong(
                    f"question and answer need {reserve_tokens} tokens, which leaves no room for the document in "
                    f"the window of {window} tokens; shorten the question or lower max_new_tokens"
                )
            cut = self._prompter.cut_middle(whole, keep)
            self.context = whole[: cut[0]] + whole[cut[1] :]
            excess = len(self._target_prompt("", ())) + reserve_tokens - window
        self._context_tokens = self._prompter.count(self.context)
        self.warnings.append(
            f"the document has {total} tokens and the target's window is {window}: the middle "
            f"{total - keep} tokens ({(total - keep) / total:.0%}) were left out"
        )
        return cut

    def _require_room(self, target_prompt: list[int], sampling: Sampling) -> None:
        window = self.engine.backend.target.window
        if len(target_prompt) + sampling.max_new_tokens > window:
            raise PromptTooLong(
                f"prompt ({len(target_prompt)} tokens) and max_new_tokens ({sampling.max_new_tokens}) exceed the "
                f"target's window of {window} tokens; shorten the question, lower max_new_tokens, or open the "
                "document with a larger reserve_tokens"
            )

    # -- retrieval ------------------------------------------------------------------------------------------

    def _retrieve(
        self, query: str, question: str, history: Turns, sampling: Sampling, progress: StageProgress | None
    ) -> tuple[list[ScoredChunk], list[str]]:
        """The passages the drafter reads, in document order, and what to tell the user about them."""
        if self._index is None:
            self._index = Index.build(
                as_documents(self.documents, self._pieces),
                self._prompter.count,
                self.retrieval,
                embedder=self.engine.embedder(self.retrieval),
                progress=stage(progress, "Indexing the document"),
            )
        budget = self.retrieval.context_budget
        if budget is None:
            budget = context_budget(self._context_tokens, self.engine.backend.target.window)
        # What is left of the drafter's own window, which may be the shorter one.
        drafter = self.engine.backend.drafter
        empty = len(self._retrieved_prompt(self.engine.draft_prompter, question, history, []))
        budget = max(1, min(budget, drafter.window - empty - sampling.max_new_tokens))
        result = self._index.search(query, budget)
        return [in_documents(f, self._pieces) for f in result.chunks], list(result.warnings)

    # -- settings -------------------------------------------------------------------------------------------

    def _eta(self, speculation: Speculation) -> float:
        """The transfer strength in force: 0 where the method or law has none, else as asked or the default."""
        if speculation.method != "rapid" or speculation.law == "exact":
            return 0.0
        if speculation.eta is not None:
            return float(speculation.eta)
        backend = self.engine.backend
        return ETA_LARGER_DRAFTER if backend.drafter.num_parameters > backend.target.num_parameters else ETA_SELF

    def _settings(self, speculation: Speculation, sampling: Sampling, eta: float, seed: int) -> dict[str, object]:
        backend = self.engine.backend
        return {
            "target": backend.target.name,
            "drafter": "self" if backend.self_speculation else backend.drafter.name,
            **asdict(speculation),
            "eta": eta,
            "lossless": speculation.lossless or eta == 0,
            **asdict(sampling),
            "seed": seed,
            "retrieval": asdict(self.retrieval),
        }


def stage(progress: StageProgress | None, what: str) -> ProgressFn | None:
    """The progress of one stage, as the models and the index report it."""
    return (lambda done, total: progress(what, done, total)) if progress else None
