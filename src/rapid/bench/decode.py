"""`rapid bench decode`: methods side by side on the same prompts.

For each prompt every method answers once per repeat, the order rotating, so that a machine that slows down slows all
of them. Our methods share one session, thus one reading of the prompt; one plain answer of either engine goes before,
unmeasured, to warm up and to be what all answers are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rapid.bench.ends import without_ends
from rapid.bench.methods import METHODS, OUR_METHODS, speculation
from rapid.bench.process import peak_rss, restart_peak_rss
from rapid.bench.prompts import BenchPrompt, choose, load_items
from rapid.bench.runs import Run
from rapid.bench.setup import load_engine
from rapid.bench.summary import summarise
from rapid.errors import InvalidParameter
from rapid.params import Models, Retrieval, Sampling, Speculation
from rapid.planning import stored_dtype

if TYPE_CHECKING:
    from rapid.bench.peers import TransformersPeer
    from rapid.engine import Engine
    from rapid.session import Session

# Room for the question and the template's words beside the document.
_QUESTION_TOKENS = 256

Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class DecodeSettings:
    """What to measure.

    contexts          tokens of the documents.
    prompts, repeats  questions per context, answers to each by each method.
    num_draft_tokens  gamma of all methods that draft a fixed number (hf-lookup, hf-assisted, lookup, sd, rapid);
                      None lets lookup and sd follow the governor.
    fixed_length      answers all have `max_new_tokens`: end tokens are suppressed, for every method alike.
    """

    models: Models = field(default_factory=Models)
    contexts: Sequence[int] = (4000, 7500)
    methods: Sequence[str] = METHODS
    tasks: Sequence[str] = ("sample",)
    prompts: int = 3
    repeats: int = 1
    max_new_tokens: int = 64
    fixed_length: bool = False
    num_draft_tokens: int | None = 10
    eta: float = 10.0
    retrieval: Retrieval = field(default_factory=Retrieval)

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise InvalidParameter(f"methods must be among {', '.join(METHODS)}, got {method!r}")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise InvalidParameter("methods must name at least one method, none of them twice")
        if not self.contexts or min(self.contexts) < 1:
            raise InvalidParameter("contexts must be token counts of at least 1")
        if min(self.prompts, self.repeats, self.max_new_tokens) < 1:
            raise InvalidParameter("prompts, repeats and max_new_tokens must be at least 1")

    @property
    def peers(self) -> list[str]:
        """The methods of transformers."""
        return [method for method in self.methods if method not in OUR_METHODS]

    def speculation(self, method: str) -> Speculation:
        """Ours by the benchmark's name for it."""
        return speculation(method, self.num_draft_tokens, self.eta)


def bench_decode(settings: DecodeSettings, say: Say, save: Save | None = None) -> dict[str, Any]:
    """The report: conditions, rows, summary. `save` is given the report so far after each prompt.

    Raises `InvalidParameter` for contexts beyond the window and for tasks with too few questions.
    """
    items = load_items(settings.tasks)
    loaded = load_engine(settings.models, say)
    engine = loaded.engine
    window = engine.backend.target.window
    if max(settings.contexts) + settings.max_new_tokens + _QUESTION_TOKENS > window:
        raise InvalidParameter(
            f"a context of {max(settings.contexts)} leaves no room for question and answer in the window of {window}; "
            "use shorter contexts or fewer new tokens"
        )
    prompts = [
        prompt for n in settings.contexts for prompt in choose(items, engine.target_prompter, n, settings.prompts)
    ]
    peer = _peer(settings, engine, say)
    rows: list[dict[str, Any]] = []
    report = {"conditions": loaded.conditions(**_described(settings)), "rows": rows, "summary": [], "groups": []}
    models = [*loaded.models, *(peer.models if peer else [])]
    reading: _Reading | None = None
    with _ends(settings, models, engine.backend.target.eos_token_ids):
        for number, prompt in enumerate(prompts):
            say(f"[{number + 1}/{len(prompts)}] {prompt.id}: {prompt.context} tokens")
            if reading is None or reading.text != prompt.text:
                reading = None  # the caches of a text are gone before the next one is read
                reading = _Reading(settings, engine, prompt)
            rows += _PromptBench(settings, reading, peer, prompt).rows(number, say)
            report.update(summarise(rows))
            if save:
                save(report)
    return report


class _Reading:
    """A text as our engine has read it, for all prompts on it. `prefill_s`: what its first answer had to read."""

    def __init__(self, settings: DecodeSettings, engine: Engine, prompt: BenchPrompt) -> None:
        from rapid.types import Document

        self.text = prompt.text
        self.prefill_s = 0.0
        self.prompter = engine.target_prompter
        self.session: Session = engine.open(
            Document(prompt.text, prompt.id),
            retrieval=settings.retrieval,
            reserve_tokens=settings.max_new_tokens + _QUESTION_TOKENS,
        )


class _PromptBench:
    """All answers to one prompt."""

    def __init__(
        self, settings: DecodeSettings, reading: _Reading, peer: TransformersPeer | None, prompt: BenchPrompt
    ) -> None:
        self._settings, self._reading, self._prompt, self._peer = settings, reading, prompt, peer
        ids = reading.prompter.encode(reading.session.context, prompt.question, retrieved=False)
        self._prompt_tokens = len(ids)
        self._draft_reading_s = {"retrieval": 0.0, "prefill": 0.0}
        self._plain = self._ask("lc").token_ids
        self._peer_plain: list[int] | None = None
        if peer:
            peer.read(ids)
            self._peer_plain = self._run("hf-plain").token_ids

    def rows(self, number: int, say: Say) -> Iterator[dict[str, Any]]:
        """One row for each method and repeat; `number` is the prompt's, for the order of methods."""
        methods = list(self._settings.methods)
        for repeat in range(self._settings.repeats):
            first = (number * self._settings.repeats + repeat) % len(methods)
            for method in methods[first:] + methods[:first]:
                run = self._run(method)
                row = self._row(method, repeat, run)
                say(
                    f"  {method}: {run.decode_tokens_per_s:.1f} tokens/s, {len(run.token_ids)} tokens, "
                    f"equal to plain: {'yes' if row['equal_to_plain'] else 'no'}"
                )
                yield row

    def _run(self, method: str) -> Run:
        if method in OUR_METHODS:
            return self._ask(method)
        assert self._peer is not None
        length = 10 if self._settings.num_draft_tokens is None else self._settings.num_draft_tokens
        return self._peer.run(method, self._settings.max_new_tokens, length)

    def _ask(self, method: str) -> Run:
        restart_peak_rss()
        answer = self._reading.session.ask(
            self._prompt.question,
            speculation=self._settings.speculation(method),
            sampling=Sampling(max_new_tokens=self._settings.max_new_tokens, seed=0),
        )
        stats = answer.stats
        # The first answer's figures include the reading of the document, which later ones found read.
        prefill_s = self._reading.prefill_s = max(self._reading.prefill_s, stats.prefill_s)
        drafts = {"retrieval": stats.retrieval_s, "prefill": stats.draft_prefill_s}
        first_round_s = stats.ttft_s - stats.load_s - stats.prefill_s - sum(drafts.values())
        if answer.draft_prompt_tokens:
            drafts = self._draft_reading_s = {k: max(v, self._draft_reading_s[k]) for k, v in drafts.items()}
        return Run(
            token_ids=answer.token_ids,
            prefill_s=prefill_s,
            ttft_s=prefill_s + sum(drafts.values()) + first_round_s,
            decode_s=stats.decode_s,
            draft_s=stats.draft_s,
            verify_s=stats.verify_s,
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            peak_rss_bytes=peak_rss(),
        )

    def _row(self, method: str, repeat: int, run: Run) -> dict[str, Any]:
        plain = self._plain if method in OUR_METHODS else self._peer_plain
        return {
            "method": method,
            "context": self._prompt.context,
            "prompt": self._prompt.id,
            "repeat": repeat,
            "decode_tokens_per_s": run.decode_tokens_per_s,
            "prefill_s": run.prefill_s,
            "ttft_s": run.ttft_s,
            "acceptance_rate": run.accepted / run.drafted if run.drafted else None,
            "mean_acceptance_length": 1 + run.accepted / run.rounds,
            "draft_s": run.draft_s,
            "verify_s": run.verify_s,
            "other_s": run.other_s,
            "peak_rss_bytes": run.peak_rss_bytes,
            "equal_to_plain": run.token_ids == plain,
            "equal_to_lc": run.token_ids == self._plain,
            "metric": self._prompt.metric,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(run.token_ids),
            "decode_s": run.decode_s,
            "rounds": run.rounds,
            "drafted": run.drafted,
            "accepted": run.accepted,
        }


def _peer(settings: DecodeSettings, engine: Engine, say: Say) -> TransformersPeer | None:
    if not settings.peers:
        return None
    from rapid.bench.peers import TransformersPeer

    say("loading the models once more for transformers")
    models = settings.models
    return TransformersPeer(
        models.target,
        models.drafter_source,
        settings.peers,
        dtype=stored_dtype(models.dtype),  # transformers has no packed linears of its own
        device=models.device,
        end_ids=engine.backend.target.eos_token_ids,
    )


@contextmanager
def _ends(settings: DecodeSettings, models: Sequence[Any], end_ids: frozenset[int]) -> Iterator[None]:
    if not settings.fixed_length:
        yield
        return
    with without_ends(models, sorted(end_ids)):
        yield


def _described(settings: DecodeSettings) -> dict[str, Any]:
    return {
        "contexts": list(settings.contexts),
        "methods": list(settings.methods),
        "tasks": list(settings.tasks),
        "prompts": settings.prompts,
        "repeats": settings.repeats,
        "max_new_tokens": settings.max_new_tokens,
        "ends": "suppressed" if settings.fixed_length else "natural",
        "num_draft_tokens": "auto" if settings.num_draft_tokens is None else settings.num_draft_tokens,
        "eta": settings.eta,
        "temperature": 0.0,
        "seed": 0,
        "retrieval": asdict(settings.retrieval),
    }
