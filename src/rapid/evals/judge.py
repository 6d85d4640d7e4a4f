"""A language model as the judge of a run's answers, over any OpenAI-compatible endpoint (the paper's real-world test
is judged this way, on a scale from 1 to 10).

Every vote is kept with the prompt that asked for it, in judgements.jsonl; judge.json holds the means. The judge reads
the question, a reference and the answer, never the document.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from rapid.errors import DocumentError, InvalidParameter, RapidError
from rapid.evals.configuration import SETTINGS, Configuration, Key
from rapid.evals.files import write_json
from rapid.evals.questions import Asked, read_questions
from rapid.evals.results import Result
from rapid.evals.stats import bootstrap_mean
from rapid.evals.store import read_run

JUDGEMENTS = "judgements.jsonl"
JUDGE = "judge.json"
KEY_VARIABLE = "OPENAI_API_KEY"

PROMPT = Template("""Please act as an impartial judge and rate the quality of an assistant's answer to a user's \
question. Compare it with the reference answer: rate whether it is correct, complete, relevant and clear. Do not let \
its length influence you. Explain your rating in a few sentences. Then rate the answer on a scale from 1 (worthless) \
to 10 (as good as the reference or better), strictly in this format: "[[rating]]", for example "Rating: [[5]]".

[Question]
$question

[Reference answer]
$reference

[The assistant's answer]
$answer

[End of the assistant's answer]""")
_RATING = re.compile(r"\[\[\s*(10|[1-9])(?:\.0)?\s*\]\]")


@dataclass(frozen=True)
class Endpoint:
    """Where the judge is. base_url ends before `/chat/completions`; the key comes from OPENAI_API_KEY."""

    base_url: str
    model: str
    temperature: float = 0.0
    max_tokens: int = 512
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise InvalidParameter(f"the judge's base URL must begin with http:// or https://, got {self.base_url!r}")

    def complete(self, prompt: str, seed: int) -> str:
        """The judge's reply. Raises `RapidError` where the endpoint fails or answers something else."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": seed,
        }
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise RapidError(f"the judge at {url} does not answer ({error}); check the URL, or try later") from None
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RapidError(f"the judge at {url} does not answer as OpenAI's API does ({error!r})") from None


@dataclass(frozen=True)
class Vote:
    """One reply of the judge; `rating` is None where it holds none."""

    rating: int | None
    text: str


@dataclass(frozen=True)
class Judgement:
    """All votes on one answer."""

    key: Key
    prompt: str
    votes: tuple[Vote, ...]

    @property
    def rating(self) -> float | None:
        """The mean of the votes that hold a rating; None where none does."""
        ratings = [vote.rating for vote in self.votes if vote.rating is not None]
        return sum(ratings) / len(ratings) if ratings else None


def judge_prompt(asked: Asked, answer: str) -> str:
    """What the judge is asked about an answer, in a single pass over the template."""
    return PROMPT.substitute(question=asked.question, reference=asked.answers[0], answer=answer)


def parse_rating(text: str) -> int | None:
    """The last rating in double brackets, 1 to 10."""
    found = _RATING.findall(text)
    return int(found[-1]) if found else None


def judge(
    directory: str | Path,
    endpoint: Endpoint,
    *,
    num_votes: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Have every answer of a run judged that is not judged yet; the rows of judge.json."""
    if num_votes < 1:
        raise InvalidParameter(f"the number of votes must be at least 1, got {num_votes}")
    run = read_run(directory)
    asked = {(question.task, question.item): question for question in read_questions(run.directory)}
    path = run.directory / JUDGEMENTS
    judgements, end = _read(path)
    with path.open("ab") as file:
        file.truncate(end)
        for number, result in enumerate(run.results, start=1):
            if result.key not in judgements:
                judgements[result.key] = judgement = _judged(result, asked, endpoint, num_votes)
                file.write(f"{_line(judgement)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            if on_progress:
                on_progress(number, len(run.results))
    rows = summary(judgements.values())
    write_json(run.directory / JUDGE, {"endpoint": asdict(endpoint), "votes": num_votes, "rows": rows})
    return rows


def summary(judgements: Iterable[Judgement]) -> list[dict[str, Any]]:
    """One row for each task and variant: the mean rating with its interval; answers without a rating are counted."""
    found: dict[tuple[str, Configuration], list[float | None]] = {}
    for judgement in judgements:
        variant = replace(judgement.key.configuration, seed=None)
        found.setdefault((judgement.key.task, variant), []).append(judgement.rating)
    rows = []
    for (task, variant), ratings in found.items():
        known = [rating for rating in ratings if rating is not None]
        interval = bootstrap_mean(known) if known else None
        settings = variant.as_dict()
        del settings["seed"]
        rows.append(
            {
                "task": task,
                **settings,
                "rating": interval.value if interval else None,
                "ci_low": interval.low if interval else None,
                "ci_high": interval.high if interval else None,
                "n": len(known),
                "unrated": len(ratings) - len(known),
            }
        )
    return rows


def _judged(result: Result, asked: dict[tuple[str, str], Asked], endpoint: Endpoint, num_votes: int) -> Judgement:
    if (result.task, result.item) not in asked:
        raise DocumentError(f"the run does not hold the question of {result.item}; run the evaluation again to add it")
    prompt = judge_prompt(asked[result.task, result.item], result.prediction)
    replies = [endpoint.complete(prompt, seed) for seed in range(num_votes)]
    return Judgement(result.key, prompt, tuple(Vote(parse_rating(reply), reply) for reply in replies))


def _line(judgement: Judgement) -> str:
    key = judgement.key
    values = {"task": key.task, "item": key.item, **key.configuration.as_dict(), "prompt": judgement.prompt}
    return json.dumps({**values, "votes": [asdict(vote) for vote in judgement.votes]}, ensure_ascii=False)


def _read(path: Path) -> tuple[dict[Key, Judgement], int]:
    """Finished judgements, and the bytes they take: what follows the last newline was cut off by a crash."""
    found: dict[Key, Judgement] = {}
    if not path.is_file():
        return found, 0
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        for line in lines:
            row = json.loads(line)
            key = Key(row["task"], row["item"], Configuration(**{name: row[name] for name in SETTINGS}))
            found[key] = Judgement(key, row["prompt"], tuple(Vote(**vote) for vote in row["votes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DocumentError(f"{path}, line {len(found) + 1} is no judgement ({error!r}); delete that line") from None
    return found, sum(len(line) + 1 for line in lines)
