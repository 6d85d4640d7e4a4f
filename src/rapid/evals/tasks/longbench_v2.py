"""LongBench v2 (Bai et al. 2024; prompts and rules of THUDM/LongBench 2e00731, MIT).

503 four-way questions; 120,000 tokens of prompt for 128K models. Modes: `zero_shot`; `cot`, two stages of
which the second has no document; `no_context`, question and choices alone. The benchmark's RAG mode is the
retrieved prompt of `zero_shot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from rapid.errors import DocumentError, InvalidParameter
from rapid.evals.extraction import Extraction
from rapid.evals.loaders import Row, read_rows, text_field
from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import LETTERS, Form, Item, SecondStage, Task
from rapid.evals.scorers import longbench_choice

Mode = Literal["zero_shot", "cot", "no_context"]
MODES: tuple[str, ...] = get_args(Mode)

HUB_ID = "THUDM/LongBench-v2"
HUB_FILE = "data.json"
SPLITS = ("difficulty", "length")

ANSWER_TOKENS = 128
REASONING_TOKENS = 1024

_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
_LEAD_IN = "Let’s think step by step:"
_QUESTION = """What is the correct answer to this question: $question
Choices:
(A) $choice_a
(B) $choice_b
(C) $choice_c
(D) $choice_d

"""
_AFTER = f"\n</text>\n\n{_QUESTION}"

ZERO_SHOT = PromptTemplate(
    before="Please read the following text and answer the question below.\n\n<text>\n",
    after=_AFTER + _FORMAT,
)
COT = PromptTemplate(
    before="Please read the following text and answer the questions below.\n\n<text>\n",
    after=_AFTER + _LEAD_IN,
)
COT_ANSWER = PromptTemplate(
    before="Please read the following text and answer the questions below.\n\n"
    "The text is too long and omitted here.\n\n",
    after=f"{_QUESTION}{_LEAD_IN} $cot\n\nBased on the above, what is the single, most likely answer choice? {_FORMAT}",
)
NO_CONTEXT = PromptTemplate(before="", after=f"{_QUESTION}What is the single, most likely answer choice? {_FORMAT}")


def longbench_v2(
    source: str | Path = HUB_ID,
    *,
    mode: Mode = "zero_shot",
    extraction: Extraction = "strict",
    compensated: bool = False,
) -> Task:
    """The benchmark from a hub id or a local file of its rows."""
    if mode not in MODES:
        raise InvalidParameter(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    scorer = longbench_choice(extraction, compensated=compensated)
    forms = {
        "zero_shot": Form(ZERO_SHOT, ANSWER_TOKENS, scorer),
        "cot": Form(COT, REASONING_TOKENS, scorer, second_stage=SecondStage(COT_ANSWER, ANSWER_TOKENS)),
        "no_context": Form(NO_CONTEXT, ANSWER_TOKENS, scorer, uses_context=False),
    }
    items = tuple(_item(row, number) for number, row in enumerate(read_rows(source, HUB_FILE), start=1))
    name = "longbench_v2" if mode == "zero_shot" else f"longbench_v2_{mode}"
    return Task(name, items, {"mc_accuracy": forms[mode]}, splits=SPLITS)


def _item(row: Row, number: int) -> Item:
    where = f"LongBench v2 row {number}"

    def field(name: str) -> str:
        return text_field(row, name, where).strip()

    letter = field("answer")
    if letter not in tuple(LETTERS):
        raise DocumentError(f"{where}: answer must be A, B, C or D, got {letter!r}")
    choices = (field("choice_A"), field("choice_B"), field("choice_C"), field("choice_D"))
    return Item(
        id=field("_id"),
        context=field("context"),
        question=field("question"),
        answers=(choices[LETTERS.index(letter)],),
        metric="mc_accuracy",
        choices=choices,
        answer_letter=letter,
        source="LongBench v2",
        license="Apache-2.0 (dataset card)",
        fields={name: field(name) for name in ("difficulty", "length", "domain", "sub_domain")},
    )
