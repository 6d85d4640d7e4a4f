"""Tasks of one's own: a JSONL file, one item a line, and the sample that is shipped in that format.

Fields of a line: id, context, question, answers (list of texts), choices (four texts) or null, answer_letter
or null, metric (qa_f1, mc_accuracy, rougeLsum, string_match_part), and optionally source, license, tokens.
Any other field with a text value can be split by: difficulty, length and domain are.

Questions and multiple choice are asked and scored as InfiniteBench asks them, with "text" for "book";
summaries as questions with room for a long answer; string_match_part as RULER's question answering.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rapid.errors import DocumentError
from rapid.evals.loaders import Row, list_field, read_rows, text_field
from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import Form, Item, Task
from rapid.evals.scorers import infinitebench_choice, qa_f1, rouge_l_sum, string_match_part
from rapid.evals.tasks.infinitebench import CHOICE_INSTRUCTION
from rapid.evals.tasks.ruler.qa import TEMPLATE as DOCUMENTS

SPLITS = ("difficulty", "length", "domain")

# One beginning for all metrics: questions of different kinds on one document share its cache.
_BEFORE = "Read the following text and answer the question.\n\n"
_QUESTION = "\n\nQuestion: $question"

FORMS = {
    "qa_f1": Form(PromptTemplate(_BEFORE, f"{_QUESTION}\n\nBe very concise."), 40, qa_f1),
    "mc_accuracy": Form(PromptTemplate(_BEFORE, f"{_QUESTION}\n\n{CHOICE_INSTRUCTION}"), 40, infinitebench_choice),
    "rougeLsum": Form(PromptTemplate(_BEFORE, _QUESTION), 256, rouge_l_sum),
    "string_match_part": Form(DOCUMENTS, 32, string_match_part),
}


def jsonl_task(path: str | Path, name: str | None = None) -> Task:
    """The task of a JSONL file, named after it."""
    rows = read_rows(path)
    items = tuple(_item(row, f"{path}, item {number}") for number, row in enumerate(rows, start=1))
    return Task(name or Path(path).stem, items, FORMS, splits=SPLITS)


def sample() -> Task:
    """The shipped items: real documents of 3 to 8 thousand tokens. data/ATTRIBUTION.md names the sources."""
    with as_file(files("rapid.evals") / "data" / "sample.jsonl") as path:
        return jsonl_task(path)


def _item(row: Row, where: str) -> Item:
    choices = letter = None
    if row.get("choices") is not None:
        options = list_field(row, "choices", where)
        if len(options) != 4:
            raise DocumentError(f"{where}: choices must be four texts, got {len(options)}")
        choices = (options[0], options[1], options[2], options[3])
        letter = text_field(row, "answer_letter", where)
    metric = text_field(row, "metric", where)
    if metric == "mc_accuracy" and choices is None:
        raise DocumentError(f"{where}: metric mc_accuracy needs choices and answer_letter")
    tokens = row.get("tokens")
    return Item(
        id=text_field(row, "id", where),
        context=text_field(row, "context", where),
        question=text_field(row, "question", where),
        answers=tuple(list_field(row, "answers", where)),
        metric=metric,
        choices=choices,
        answer_letter=letter,
        source=str(row.get("source", "")),
        license=str(row.get("license", "")),
        tokens=tokens if isinstance(tokens, int) else None,
        fields={name: value for name in SPLITS if isinstance(value := row.get(name), str)},
    )
