"""A session: opened documents, ready for questions.

The way of one question: retrieve -> write two prompts from one template -> draft, verify, accept -> text.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rapid.answering import AnswerStream
from rapid.backends.base import CacheState, GenerateRequest
from rapid.context import join, visible_pieces
from rapid.decode.stop import StopRule
from rapid.documents.text import without_surrogates
from rapid.drafting.model import shared_prefix
from rapid.errors import InvalidParameter, ModelError, PromptTooLong
from rapid.params import Retrieval, Sampling, Speculation
from rapid.passages import Passages
from rapid.prompt import Prompter, Template
from rapid.resolve import Resolved
from rapid.retrieval.select import context_budget, join_chunks
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
        self.reserve_tokens = reserve_tokens
        self.warnings: list[str] = []
        self._prompter = engine.target_prompter
        self._reader = engine.backend.open()
        cut = self._cut_to_fit(reserve_tokens)
        pieces = visible_pieces(self.documents, cut if retrieval.index == "target" else None)
        self._passages = Passages(self.documents, pieces, self._prompter.count, engine.embedder)
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
        query    what to retrieve by; the question itself unless given. With a query the question may be empty.
        Raises `InvalidParameter` for an empty question and `PromptTooLong` where question and answer do not fit
        beside the document.
        """
        asked = time.perf_counter()
        speculation, sampling = speculation or Speculation(), sampling or Sampling()
        if not question.strip() and not query:
            raise InvalidParameter("the question is empty; ask something about the document")
        # No tokenizer takes a lone surrogate, which a badly encoded argument or request brings in.
        question, query = without_surrogates(question), without_surrogates(query or question)
        history = [(without_surrogates(q), without_surrogates(a)) for q, a in history]
        backend = self.engine.backend
        resolved = self.engine.resolve(speculation)
        reader_of_passages = backend.target if speculation.method == "rag" else backend.drafter
        budget = self._budget(question, history, sampling, reader_of_passages.window)
        if resolved.optional_model and not self._reader.model_drafting_pays(self._context_tokens, budget):
            resolved = replace(resolved, drafters=("lookup",))

        found: list[ScoredChunk] = []
        warnings = [*self.warnings, *resolved.warnings]
        if speculation.method == "rag" or "model" in resolved.drafters:
            indexing = stage(progress, "Indexing the document")
            found, notes = self._passages.find(query, budget, self.retrieval, indexing)
            warnings += notes
        retrieval_s = time.perf_counter() - asked
        draft_prompt: list[int] = []
        if speculation.method == "rag":
            target_prompt = self._retrieved_prompt(self._prompter, question, history, found)
        else:
            target_prompt = self._target_prompt(question, history)
        if "model" in resolved.drafters:
            draft_prompt = self._retrieved_prompt(self.engine.draft_prompter, question, history, found)
        elif "full" in resolved.drafters:
            draft_prompt = self._whole_prompt(self.engine.draft_prompter, question, history)
        self._require_room(target_prompt, sampling)
        if len(draft_prompt) > backend.drafter.window:
            warnings.append(
                f"the drafter's prompt ({len(draft_prompt)} tokens) exceeds its window of {backend.drafter.window} "
                "tokens: nothing is drafted, the target answers alone"
            )

        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        text = TextStream(self._prompter.decode, sampling.stop)
        request = GenerateRequest(
            target_prompt=target_prompt,
            draft_prompt=draft_prompt,
            reads="retrieved" if speculation.method == "rag" else "document",
            drafters=resolved.drafters,
            num_draft_tokens=resolved.num_draft_tokens,
            warp=TokenWarp(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
            rule=resolved.rule,
            stop=StopRule(sampling.max_new_tokens, backend.target.eos_token_ids, lambda ids: text.push(ids[-1])),
            seed=seed,
            streaming=(speculation.streaming_sinks, speculation.streaming_window),
            min_draft_prob=speculation.min_draft_prob,
        )
        with self.engine.memory.using(self._reader, len(target_prompt) + sampling.max_new_tokens):
            generation = self._reader.generate(request, stage(progress, "Reading the prompts"))
        stats, self._unreported = self._unreported, Stats()
        asked -= stats.load_s + stats.prefill_s
        stats.retrieval_s = retrieval_s
        stats.prefill_s += generation.prefill_s
        stats.draft_prefill_s = generation.draft_prefill_s
        unfinished = Answer(
            text="",
            token_ids=[],
            finish_reason="length",
            method=speculation.method,
            settings=self._settings(speculation, sampling, resolved, seed),
            prompt_tokens=len(target_prompt),
            draft_prompt_tokens=len(draft_prompt),
            stats=stats,
            retrieved=found,
            warnings=warnings,
        )
        return AnswerStream(generation, request.stop, text, unfinished, asked)

    # -- what the models read -------------------------------------------------------------------------------

    def prefill(self, progress: StageProgress | None = None) -> float:
        """Have the target read the documents now, instead of at the first question, whose figures still include
        the seconds it took. They are returned, too."""
        ids = self._target_prompt("", ())
        with self.engine.memory.using(self._reader, len(ids)):
            seconds = self._reader.prefill(ids, stage(progress, "Reading the document"))
        self._unreported.prefill_s += seconds
        return seconds

    def save(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Write the documents and the target's reading of them to `path`, for `Engine.restore`.

        dtype  None keeps the reading exactly, so that answers are the same to the last bit; `float16` halves the file.
        The file is written whole or not at all; an older session of that name is replaced. Raises `SessionError`
        where it cannot be written, `ModelError` where the target's cache cannot be saved.
        """
        from rapid import store
        from rapid.sealed import check_destination

        path = Path(path)
        check_destination(path)
        ids = self._target_prompt("", ())
        with self.engine.memory.using(self._reader, len(ids)):
            # An answer of which the document is part has read what all questions share: it is not disturbed.
            shared = shared_prefix(ids, self._target_prompt("?", ()))
            if shared_prefix(self._reader.token_ids, ids) < shared:
                self._reader.prefill(ids)
            state = self._reader.export(shared)
            saved = store.SavedSession(
                self._reader.fingerprint,
                self._reader.dtype,
                self.documents,
                self.retrieval,
                self.template,
                self.reserve_tokens,
                state,
            )
            store.save(path, saved, dtype)

    def adopt(self, state: CacheState, started: float) -> None:
        """Take over a saved reading of these documents; the first question's figures include the time since `started`
        (of `time.perf_counter`). Raises `ModelError` where it is the reading of another text."""
        ids = self._target_prompt("", ())
        if not state.token_ids or state.token_ids != ids[: len(state.token_ids)]:
            raise ModelError(
                "the saved reading is not of these documents as this model's tokenizer and window have them; "
                "read the documents again"
            )
        with self.engine.memory.using(self._reader, len(ids)):
            self._reader.restore(state)
        self._unreported.prefill_s += time.perf_counter() - started

    def _target_prompt(self, question: str, history: Turns) -> list[int]:
        return self._whole_prompt(self._prompter, question, history)

    def _whole_prompt(self, prompter: Prompter, question: str, history: Turns) -> list[int]:
        return prompter.encode(self.context, question, retrieved=False, history=history, template=self.template)

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

    def _budget(self, question: str, history: Turns, sampling: Sampling, window: int) -> int:
        """Tokens that may be retrieved: the rule's or the setting's, within the `window` of who reads them."""
        budget = self.retrieval.context_budget
        if budget is None:
            budget = context_budget(self._context_tokens, self.engine.backend.target.window)
        empty = len(self._retrieved_prompt(self.engine.draft_prompter, question, history, []))
        return max(1, min(budget, window - empty - sampling.max_new_tokens))

    @property
    def sources(self) -> list[Document]:
        """What `document` of a retrieved passage counts: the documents, then those of source `unrelated`."""
        return self._passages.sources

    # -- settings -------------------------------------------------------------------------------------------

    def _settings(
        self, speculation: Speculation, sampling: Sampling, resolved: Resolved, seed: int
    ) -> dict[str, object]:
        backend = self.engine.backend
        return {
            "target": backend.target.name,
            "drafter": "self" if backend.self_speculation or speculation.method == "magicdec" else backend.drafter.name,
            **asdict(speculation),
            "eta": resolved.rule.eta,
            "num_draft_tokens": resolved.num_draft_tokens,
            "lossless": not resolved.rule.transfers,
            **asdict(sampling),
            "seed": seed,
            "retrieval": asdict(self.retrieval),
        }


def stage(progress: StageProgress | None, what: str) -> ProgressFn | None:
    """The progress of one stage, as the models and the index report it."""
    return (lambda done, total: progress(what, done, total)) if progress else None
