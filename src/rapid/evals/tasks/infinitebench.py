"""InfiniteBench's English book tasks (Zhang et al. 2024; the `gpt4` prompts of OpenBMB/InfiniteBench, MIT).

RAPID does not release its prompts for these tasks; the `gpt4` set is the one for instruction-tuned models.
None of them says "the following text", so the retrieved prompt differs from the long one by its context only.
"""

from __future__ import annotations

from pathlib import Path

from rapid.errors import DocumentError, InvalidParameter
from rapid.evals.loaders import Row, list_field, read_rows, text_field
from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import LETTERS, Form, Item, Task
from rapid.evals.scorers import infinitebench_choice, qa_f1, rouge_l_sum

HUB_ID = "xinrongzhang2022/InfiniteBench"
SYSTEM = "You are a helpful assistant."

CHOICE_INSTRUCTION = (
    "Only one of the following options is correct, tell me the answer using one single letter "
    "(A, B, C, or D). Don't say anything else.\nA. $choice_a\nB. $choice_b\nC. $choice_c\nD. $choice_d"
)
QA = PromptTemplate(
    before="Read the book below and answer a question.\n\n",
    after="\n\nQuestion: $question\n\nBe very concise.",
    system=SYSTEM,
)
CHOICE = PromptTemplate(
    before="Read the book and answer the question.\n\n",
    after=f"\n\nQuestion: $question\n\n{CHOICE_INSTRUCTION}",
    system=SYSTEM,
)
SUMMARY = PromptTemplate(before="Summarize the following book.\n\n", after="", system=SYSTEM)

# name -> (file on the hub, metric, form)
TASKS: dict[str, tuple[str, str, Form]] = {
    "en_qa": ("longbook_qa_eng.jsonl", "qa_f1", Form(QA, 40, qa_f1)),
    "en_mc": ("longbook_choice_eng.jsonl", "mc_accuracy", Form(CHOICE, 40, infinitebench_choice)),
    "en_sum": ("longbook_sum_eng.jsonl", "rougeLsum", Form(SUMMARY, 1200, rouge_l_sum)),
}


def infinitebench(name: str, source: str | Path = HUB_ID) -> Task:
    """One of `en_qa`, `en_mc`, `en_sum`, from a hub id, a local file or a directory of the hub's files."""
    if name not in TASKS:
        raise InvalidParameter(f"InfiniteBench task must be one of {', '.join(TASKS)}, got {name!r}")
    filename, metric, form = TASKS[name]
    rows = read_rows(source, filename)
    items = tuple(_item(row, number, metric) for number, row in enumerate(rows, start=1))
    return Task(f"infinitebench_{name}", items, {metric: form})


def _item(row: Row, number: int, metric: str) -> Item:
    where = f"InfiniteBench row {number}"
    answers = tuple(list_field(row, "answer", where))
    choices = letter = None
    if metric == "mc_accuracy":
        options = list_field(row, "options", where)
        if len(options) != 4 or not answers or answers[0] not in options:
            raise DocumentError(f"{where}: options must be four texts, the answer among them")
        choices = (options[0], options[1], options[2], options[3])
        letter = LETTERS[options.index(answers[0])]
    return Item(
        id=text_field(row, "id", where),
        context=text_field(row, "context", where),
        # En.Sum rows have no question; what to do stands in the template, and is what to retrieve by.
        question=text_field(row, "input", where).strip() or "Summarize the book.",
        answers=answers,
        metric=metric,
        choices=choices,
        answer_letter=letter,
        source="InfiniteBench",
        license="Apache-2.0 (dataset card)",
    )
