"""`rapid bench session`: what a second question costs, and what a saved session spares.

Answers have few tokens: what counts here is the time to the first one. It includes all that the method reads before it:
with a model drafter also the retrieved passages, which differ from question to question.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rapid.bench.methods import speculation
from rapid.bench.prompts import BenchPrompt, choose, load_items
from rapid.bench.setup import load_engine
from rapid.errors import InvalidParameter
from rapid.params import Models, Retrieval, Sampling, Speculation
from rapid.types import Answer, Document

_SECOND_QUESTION = "What is this text about?"
_QUESTION_TOKENS = 256


@dataclass(frozen=True)
class SessionSettings:
    """What to measure. A method that retrieves indexes the document at the first question."""

    models: Models = field(default_factory=Models)
    contexts: Sequence[int] = (4000, 7500)
    tasks: Sequence[str] = ("sample",)
    prompts: int = 1
    max_new_tokens: int = 16
    method: str = "auto"
    retrieval: Retrieval = field(default_factory=Retrieval)

    def __post_init__(self) -> None:
        if not self.contexts or min(*self.contexts, self.prompts, self.max_new_tokens) < 1:
            raise InvalidParameter("contexts, prompts and max_new_tokens must be at least 1")
        _ = self.speculation

    @property
    def speculation(self) -> Speculation:
        """How questions are answered: 10 tokens a draft and eta 10, where the method leaves them open."""
        return speculation(self.method, 10, 10.0)


def bench_session(settings: SessionSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """The report: one row per document, medians per context."""
    items = load_items(settings.tasks)
    loaded = load_engine(settings.models, say)
    prompter = loaded.engine.target_prompter
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rapid-bench-") as directory:
        for context in settings.contexts:
            for prompt in choose(items, prompter, context, settings.prompts):
                say(f"{prompt.id}: {context} tokens")
                rows.append(_row(settings, loaded.engine, prompt, Path(directory, "bench.session")))
    conditions = loaded.conditions(contexts=list(settings.contexts), tasks=list(settings.tasks), method=settings.method)
    return {"conditions": conditions, "rows": rows, "summary": _summary(rows)}


def _row(settings: SessionSettings, engine: Any, prompt: BenchPrompt, path: Path) -> dict[str, Any]:
    def ask(session: Any, question: str) -> Answer:
        sampling = Sampling(max_new_tokens=settings.max_new_tokens, seed=0)
        answer: Answer = session.ask(question, speculation=settings.speculation, sampling=sampling)
        return answer

    document = Document(prompt.text, prompt.id)
    reserve = settings.max_new_tokens + _QUESTION_TOKENS
    start = time.perf_counter()
    session = engine.open(document, retrieval=settings.retrieval, reserve_tokens=reserve)
    open_s = time.perf_counter() - start
    first = ask(session, prompt.question)
    second = ask(session, _SECOND_QUESTION)

    start = time.perf_counter()
    session.save(path)
    save_s = time.perf_counter() - start
    del session
    gc.collect()
    start = time.perf_counter()
    restored = engine.restore(path)
    restore_s = time.perf_counter() - start
    again = ask(restored, prompt.question)

    # A first answer's ttft counts the reading of the document, not what `open` took besides.
    prefill_s, load_s = first.stats.prefill_s, first.stats.load_s
    return {
        "context": prompt.context,
        "prompt": prompt.id,
        "prompt_tokens": first.prompt_tokens,
        "open_s": open_s,
        "prefill_s": prefill_s,
        "ttft_first_s": first.stats.ttft_s - load_s,
        "ttft_second_s": second.stats.ttft_s,
        "second_retrieval_s": second.stats.retrieval_s,
        "save_s": save_s,
        "file_bytes": path.stat().st_size,
        "restore_s": restore_s,
        "ttft_restored_s": again.stats.ttft_s,
        "second_to_first": second.stats.ttft_s / (first.stats.ttft_s - load_s),
        "restore_to_prefill": restore_s / prefill_s,
        "same_answer": again.token_ids == first.token_ids,
    }


def _summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = [key for key, value in rows[0].items() if isinstance(value, float)]
    return [
        {
            "context": context,
            **{key: median(row[key] for row in rows if row["context"] == context) for key in measured},
            "same_answer": all(row["same_answer"] for row in rows if row["context"] == context),
        }
        for context in dict.fromkeys(row["context"] for row in rows)
    ]
