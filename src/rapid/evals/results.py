"""One result: a line of items.jsonl.

A line is a JSON object with these fields, the settings of its configuration among them:
task, item; method, eta, law, alpha, num_draft_tokens, context_budget, retrieval, seed; metric, score (0 to 1),
splits {name: value}, prediction, reasoning (the first answer of a two-stage form, or null), finish_reason,
truncated (the document was cut to the window), prompt_tokens, draft_prompt_tokens, completion_tokens, rounds,
drafted, accepted, retrieved [[start, end], ...] (characters of the document);
timing {retrieval_s, prefill_s, draft_prefill_s, decode_s} in seconds.

`timing` is the only field that differs between two runs of the same plan on one machine. `prefill_s` is the time
the target took to read the prompt, whole, also where several questions shared one reading of the document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rapid.evals.configuration import SETTINGS, Configuration, Key


@dataclass(frozen=True)
class Timing:
    """Seconds of one answer."""

    retrieval_s: float = 0.0
    prefill_s: float = 0.0
    draft_prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def until_decoding_s(self) -> float:
        """All that comes before the first token: what the paper's tables call prefill."""
        return self.retrieval_s + self.prefill_s + self.draft_prefill_s


@dataclass(frozen=True)
class Result:
    """A finished item under one configuration; the module's docstring describes the fields."""

    task: str
    item: str
    configuration: Configuration
    metric: str
    score: float
    prediction: str
    finish_reason: str
    prompt_tokens: int
    draft_prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    splits: Mapping[str, str] = field(default_factory=dict)
    retrieved: tuple[tuple[int, int], ...] = ()
    reasoning: str | None = None
    truncated: bool = False
    timing: Timing = field(default_factory=Timing)

    @property
    def key(self) -> Key:
        """Which item and configuration this answers."""
        return Key(self.task, self.item, self.configuration)

    def line(self) -> str:
        """The result as one line of JSON, without its newline."""
        values = asdict(self)
        settings = values.pop("configuration")
        timing = values.pop("timing")
        ordered = {"task": self.task, "item": self.item, **settings, **values, "timing": timing}
        return json.dumps(ordered, ensure_ascii=False, allow_nan=False)


def parse_line(line: str) -> Result:
    """The result of a line. Raises ValueError, TypeError or KeyError where it is not one."""
    values: dict[str, Any] = json.loads(line)
    configuration = Configuration(**{name: values.pop(name) for name in SETTINGS})
    timing = Timing(**values.pop("timing"))
    retrieved = tuple((start, end) for start, end in values.pop("retrieved"))
    return Result(configuration=configuration, timing=timing, retrieved=retrieved, **values)
