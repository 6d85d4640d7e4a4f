"""One document opened for the configurations of a run: questions in, results out.

What is read once for several answers (the document, its index, the retrieved passages) is charged in full to each
of them: `timing` says what the answer would have taken alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rapid.evals.configuration import Configuration
from rapid.evals.readings import Question, Reading, split_prompt
from rapid.evals.results import Result, Timing
from rapid.evals.truncate import cut_text
from rapid.params import Retrieval, Sampling, Speculation
from rapid.types import Answer, Document, ScoredChunk

if TYPE_CHECKING:
    from rapid.engine import Engine

# Words at a seam may take a few tokens more together than apart: closer to the limit than this is counted exactly.
_SEAM_TOKENS = 64


@dataclass(frozen=True)
class AskSettings:
    """What all answers of a run share.

    max_new_tokens  overrules the tasks' own answer lengths.
    prompt_tokens   longest user message (LongBench v2 cuts at 120,000 for windows of 128K); None: the window's.
    """

    retrieval: Retrieval = field(default_factory=Retrieval)
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    prompt_tokens: int | None = None

    def answer_tokens(self, question: Question) -> int:
        """The answer length of a question's first stage."""
        return self.max_new_tokens or question.form.max_new_tokens


class OpenReading:
    """A reading, opened by an engine. Raises `PromptTooLong` where a question leaves no room for its document."""

    def __init__(self, engine: Engine, reading: Reading, settings: AskSettings) -> None:
        self._engine = engine
        self.reading = reading
        self._settings = settings
        self._text = self._cut()
        pairs = zip(reading.context, self._text, strict=False)
        self._head = next((i for i, (whole, cut) in enumerate(pairs) if whole != cut), len(self._text))
        self._session = engine.open(
            Document(self._text, reading.questions[0].item.id),
            retrieval=settings.retrieval,
            reserve_tokens=0,
            template=reading.template,
            prefill=False,
        )
        self._document_s: float | None = None
        self._read_s: dict[tuple[Any, ...], float] = {}

    def answer(self, question: Question, configuration: Configuration) -> Result:
        """Ask one question under one configuration, and score the answer."""
        session = self._session
        session.retrieval = replace(
            self._settings.retrieval,
            context_budget=configuration.context_budget,
            source="document" if configuration.retrieval == "related" else "unrelated",
        )
        first_reading = configuration.method != "rag" and self._document_s is None
        if first_reading:
            self._document_s = session.prefill()
        answer = session.ask(
            question.after,
            speculation=speculation(configuration),
            sampling=self._sampling(configuration, self._settings.answer_tokens(question)),
            query=question.item.query,
        )
        stats = answer.stats
        prediction, reasoning = answer.text, None
        if question.form.second_stage is not None:
            prediction, reasoning = self._second_answer(question, configuration, answer.text), answer.text
        return Result(
            task=question.task.name,
            item=question.item.id,
            configuration=configuration,
            metric=question.item.metric,
            score=question.task.score(question.item, prediction),
            prediction=prediction,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            draft_prompt_tokens=answer.draft_prompt_tokens,
            completion_tokens=stats.completion_tokens,
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            splits=question.task.split_values(question.item),
            retrieved=tuple(self._span(found) for found in answer.retrieved if found.chunk.document == 0),
            reasoning=reasoning,
            truncated=self._text != self.reading.context,
            timing=self._timing(question, configuration, answer, first_reading),
        )

    def _second_answer(self, question: Question, configuration: Configuration, first: str) -> str:
        """The target's plain answer to the prompt that holds its reasoning instead of the document."""
        stage = question.form.second_stage
        assert stage is not None
        template, context, after = split_prompt(question.task.answer_prompt(question.item, first))
        session = self._engine.open(Document(context), reserve_tokens=0, template=template, prefill=False)
        sampling = self._sampling(configuration, stage.max_new_tokens)
        return session.ask(after, speculation=Speculation("lc"), sampling=sampling, query=question.item.query).text

    def _sampling(self, configuration: Configuration, max_new_tokens: int) -> Sampling:
        return Sampling(
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            seed=configuration.seed,
            max_new_tokens=max_new_tokens,
        )

    def _timing(self, question: Question, configuration: Configuration, answer: Answer, first_reading: bool) -> Timing:
        stats = answer.stats
        passages = (question.item.id, configuration.context_budget, configuration.retrieval)
        retrieval_s = 0.0
        if answer.retrieved:  # the first retrieval built the index
            retrieval_s = self._first_time(("index", configuration.retrieval), stats.retrieval_s)
        if configuration.method == "rag":
            read = self._first_time(("target", *passages), stats.prefill_s)
            return Timing(retrieval_s, prefill_s=read, decode_s=stats.decode_s)
        document_s = 0.0 if first_reading else self._document_s or 0.0
        drafted_s = 0.0
        if answer.retrieved:
            drafted_s = self._first_time(("drafter", *passages), stats.draft_prefill_s)
        elif answer.draft_prompt_tokens:  # it reads the document itself
            drafted_s = self._first_time((configuration.method,), stats.draft_prefill_s)
        return Timing(retrieval_s, document_s + stats.prefill_s, drafted_s, stats.decode_s)

    def _first_time(self, what: tuple[Any, ...], seconds: float) -> float:
        """What a reading took when it was first done; later answers found it in the cache."""
        if self._engine.backend.self_speculation and what[0] == "target":
            what = ("drafter", *what[1:])  # one model, one cache of retrieved passages
        self._read_s[what] = longest = max(self._read_s.get(what, 0.0), seconds)
        return longest

    def _span(self, found: ScoredChunk) -> tuple[int, int]:
        """Characters of the whole document, not of what a cut left of it."""
        start, end = found.chunk.start, found.chunk.end
        gap = len(self.reading.context) - len(self._text)
        return (start if start < self._head else start + gap), (end if end <= self._head else end + gap)

    def _cut(self) -> str:
        """The document, its middle cut out where the longest of its questions would not fit beside it."""
        prompter, reading = self._engine.target_prompter, self.reading
        opening = reading.template.before(retrieved=False)

        def prompt(context: str, after: str) -> int:
            return len(prompter.encode(context, after, retrieved=False, template=reading.template))

        afters = list(dict.fromkeys(question.after for question in reading.questions))
        longest = max(afters, key=prompter.count)
        before, after = prompter.count(opening), prompter.count(longest)
        # The benchmarks cut the user's message: what the chat template puts around it is no part of the halves.
        around = prompt("", longest) - before - after
        limit = self._engine.backend.target.window - max(map(self._settings.answer_tokens, reading.questions)) - around
        if self._settings.prompt_tokens is not None:
            limit = min(limit, self._settings.prompt_tokens)
        if before + prompter.count(reading.context) + after + _SEAM_TOKENS <= limit:
            return reading.context
        return cut_text(
            reading.context,
            before,
            after,
            limit,
            prompter.encode_plain,
            prompter.decode,
            lambda context: max(prompt(context, after) for after in afters) - around,
        )


def speculation(configuration: Configuration) -> Speculation:
    """The speculation that a configuration names."""
    settings: dict[str, Any] = {
        "method": configuration.method,
        "eta": configuration.eta,
        "law": configuration.law,
        "alpha": configuration.alpha,
        "num_draft_tokens": configuration.num_draft_tokens,
    }
    if configuration.method not in ("lc", "rag") and configuration.num_draft_tokens is None:
        settings["num_draft_tokens"] = "auto"
    return Speculation(**{name: value for name, value in settings.items() if value is not None})
