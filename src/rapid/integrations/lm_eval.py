"""RAPID as a model of lm-evaluation-harness (0.4.13 and later; not installed with this package).

    import lm_eval, rapid.integrations.lm_eval
    model = rapid.integrations.lm_eval.RapidLM(target="embedded", method="rapid", eta=10)
    lm_eval.simple_evaluate(model=model, tasks=[...], apply_chat_template=True)

Importing this module registers the model as `rapid`; the harness does not look for models by itself, so
`lm_eval --model rapid` needs this import first. Only tasks of output type generate_until can be run: scoring given
answers drafts nothing.

The document of a row is its field `context` where the prompt holds that text once. Otherwise (stock RULER tasks) the
prompt's last line is the question and what stands before it the document. A document that does not fit the window
loses its middle; question and answer prefix stay whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rapid.errors import InvalidParameter, RapidError
from rapid.params import Retrieval, Sampling, Speculation
from rapid.prompt import Template
from rapid.types import Document

if TYPE_CHECKING:
    from rapid.engine import Engine
    from rapid.session import Session

try:
    _LM: Any = import_module("lm_eval.api.model").LM
    _registry: Any = import_module("lm_eval.api.registry")
except ImportError:
    _LM, _registry = object, None

_SPECULATION = ("method", "eta", "law", "alpha", "num_draft_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_RETRIEVAL = ("ranking", "embedder", "chunk_tokens", "context_budget", "threshold", "index")
DEFAULT_NEW_TOKENS = 256
# A question tokenizes a little differently alone than beside the document.
_SEAM_TOKENS = 8
# What `apply_chat_template` hands to the harness and gets back: messages, to be templated when the document's place
# in them is known. The first character is a private-use one, with which no prompt begins.
_MESSAGES = "\ue010"


@dataclass(frozen=True)
class _Place:
    """What is read for a request before its question, and whether in the model's chat template."""

    chat: bool
    template: Template
    document: str


@dataclass(frozen=True)
class _Request:
    """One request of the harness, taken apart."""

    place: _Place
    question: str
    query: str
    speculation: Speculation
    sampling: Sampling


class RapidLM(_LM):  # type: ignore[misc]
    """An `LM` of the harness.

    engine         a loaded engine; None loads one from target, drafter, device, dtype and threads.
    settings       of `rapid.Speculation`, `rapid.Sampling` and `rapid.Retrieval` by their names; a request's own
                   generation arguments overrule the first two (`gen_kwargs="eta=20,law=transfer"`).
    batch_size, max_batch_size  accepted, as the harness passes them; one request is answered at a time.
    Raises `RapidError` where lm-eval is not installed, `InvalidParameter` for an unknown setting.
    """

    def __init__(
        self,
        target: str = "embedded",
        drafter: str = "self",
        *,
        engine: Engine | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        batch_size: Any = 1,
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        if _registry is None:
            raise RapidError("lm-eval is not installed; install it with: pip install lm-eval==0.4.13")
        super().__init__()
        _refuse_unknown(settings, (*_SPECULATION, *_SAMPLING, *_RETRIEVAL))
        self._defaults = {name: value for name, value in settings.items() if name not in _RETRIEVAL}
        self._retrieval = Retrieval(**{name: value for name, value in settings.items() if name in _RETRIEVAL})
        self._settings(self._defaults)  # a bad value is refused before anything is loaded
        from rapid.engine import Engine

        self.engine = engine or Engine.load(target, drafter, device=device, dtype=dtype, threads=threads)
        self._raw_engine = _without_chat_template(self.engine)

    # -- the harness's interface ----------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, in the order of the requests; requests about one document share its reading."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        taken = [self._take(request) for request in requests]
        groups: dict[_Place, list[int]] = {}
        for number, request in enumerate(taken):
            groups.setdefault(request.place, []).append(number)
        answers = [""] * len(taken)
        with tqdm(total=len(taken), disable=disable_tqdm, desc="RAPID") as bar:
            for place, numbers in groups.items():
                session = self._open(place, [taken[number] for number in numbers])
                for number in numbers:
                    request = taken[number]
                    answers[number] = session.ask(
                        request.question,
                        speculation=request.speculation,
                        sampling=request.sampling,
                        query=request.query,
                    ).text
                    self.cache_hook.add_partial("generate_until", requests[number].args, answers[number])
                    bar.update()
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refused: speculative decoding generates."""
        raise RapidError(
            "rapid generates answers and does not score given ones; choose tasks of output type generate_until"
        )

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Refused, as `loglikelihood`."""
        raise RapidError("rapid generates answers and does not score texts; choose tasks of output type generate_until")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as `generate_until` reads them; an unfinished assistant message is what the answer continues."""
        return _MESSAGES + json.dumps(list(chat_history), ensure_ascii=False)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The target's own; the harness records it and makes it part of its cache keys."""
        return str(self.engine.backend.target.tokenizer.chat_template or "")

    @property
    def tokenizer_name(self) -> str:
        """The target's name, for the harness's cache keys."""
        return str(self.engine.backend.target.name).replace("/", "__")

    # -- one request ----------------------------------------------------------------------------------------

    def _take(self, request: Any) -> _Request:
        prompt, arguments = request.args
        row: Mapping[str, Any] = request.doc if isinstance(request.doc, Mapping) else {}
        speculation, sampling = self._settings({**self._defaults, **_own_names(arguments)})
        system, message, prefix = _messages(prompt) if prompt.startswith(_MESSAGES) else (None, prompt, "")
        before, document, question = split(message, row.get("context"))
        template = Template(opening=before, middle="", system=system, answer_prefix=prefix)
        place = _Place(prompt.startswith(_MESSAGES), template, document)
        return _Request(place, question, _query(row, question or document), speculation, sampling)

    def _settings(self, given: Mapping[str, Any]) -> tuple[Speculation, Sampling]:
        _refuse_unknown(given, (*_SPECULATION, *_SAMPLING, "max_new_tokens", "stop"))
        speculation = Speculation(**{name: value for name, value in given.items() if name in _SPECULATION})
        sampling = {name: value for name, value in given.items() if name not in _SPECULATION}
        return speculation, Sampling(**{"seed": 0, "max_new_tokens": DEFAULT_NEW_TOKENS, **sampling})

    def _open(self, place: _Place, requests: Sequence[_Request]) -> Session:
        engine = self.engine if place.chat else self._raw_engine
        count = engine.target_prompter.count
        return engine.open(
            Document(place.document),
            retrieval=self._retrieval,
            reserve_tokens=_SEAM_TOKENS + max(count(r.question) + r.sampling.max_new_tokens for r in requests),
            template=place.template,
            prefill=any(r.speculation.method != "rag" for r in requests),
        )


def split(message: str, context: Any) -> tuple[str, str, str]:
    """What stands before the document, the document, and the question; joined, they are the message."""
    if isinstance(context, str) and context.strip() and message.count(context) == 1:
        return message.partition(context)
    end = message.rstrip().rfind("\n") + 1
    return ("", message[:end], message[end:]) if message[:end].strip() else ("", message, "")


def _messages(prompt: str) -> tuple[str | None, str, str]:
    """System message, user message and answer prefix of what `apply_chat_template` wrote."""
    messages = json.loads(prompt.removeprefix(_MESSAGES))
    roles = [message["role"] for message in messages]
    system = messages[0]["content"] if roles[:1] == ["system"] else None
    prefix = messages[-1]["content"] if roles[-1:] == ["assistant"] else ""
    users = [message["content"] for message in messages if message["role"] == "user"]
    if len(users) != 1 or len(messages) != 1 + (system is not None) + bool(roles[-1:] == ["assistant"]):
        raise InvalidParameter("rapid takes one question a request; run without --fewshot_as_multiturn")
    return system, users[0], prefix


def _query(row: Mapping[str, Any], question: str) -> str:
    """What to retrieve by: the row's question with its choices, or the prompt's own last words."""
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        return question
    choices = row.get("choices")
    texts = [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []
    return "\n".join((row["question"], *texts))


def _own_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's generation arguments under our names. Without `do_sample` the answer is greedy unless a
    temperature is given."""
    given = dict(arguments)
    until = given.pop("until", None) or ()
    stop = [until] if isinstance(until, str) else list(until)
    given["stop"] = tuple(text for text in stop if text)
    if "max_gen_toks" in given:
        given["max_new_tokens"] = given.pop("max_gen_toks")
    samples = given.pop("do_sample", None)
    if samples is False:
        given["temperature"] = 0.0
    elif samples:
        given.setdefault("temperature", 1.0)
    return given


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(given.keys() - set(known)):
        raise InvalidParameter(f"{unknown[0]} is no setting of rapid; use {', '.join(sorted(known))}")


def _without_chat_template(engine: Engine) -> Engine:
    """The same models, prompted by bare text: what the harness means without --apply_chat_template."""
    from rapid.engine import Engine
    from rapid.prompt import Prompter

    def bare(tokenizer: Any) -> Prompter:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = None
        return Prompter(tokenizer)

    raw = Engine(engine.backend)
    raw.target_prompter = bare(engine.backend.target.tokenizer)
    raw.draft_prompter = (
        raw.target_prompter if engine.backend.self_speculation else bare(engine.backend.drafter.tokenizer)
    )
    return raw


if _registry is not None and "rapid" not in _registry.model_registry:
    import_module("lm_eval.models")  # the harness registers its own models only while there are no others
    _registry.register_model("rapid")(RapidLM)
