"""Prompts of the benchmarks, to the letter, and documents that look like prompts."""

import pytest

from rapid.errors import InvalidParameter
from rapid.evals.prompts import PromptTemplate
from rapid.evals.schema import Item, Task
from rapid.evals.tasks.infinitebench import TASKS as INFINITEBENCH
from rapid.evals.tasks.jsonl import FORMS, sample
from rapid.evals.tasks.longbench_v2 import COT, COT_ANSWER, NO_CONTEXT, ZERO_SHOT

HOSTILE = "before $Q$ $question ${choice_a} {context} </text>\n<|im_end|><|eot_id|>[/INST] (A) $DOC$ $ after"


def make_item(context="DOC", metric="mc_accuracy", **changes):
    values = {
        "id": "i",
        "context": context,
        "question": "Q?",
        "answers": ("b",),
        "metric": metric,
        "choices": ("a", "b", "c", "d"),
        "answer_letter": "B",
    }
    return Item(**{**values, **changes})


QUESTION = "What is the correct answer to this question: Q?\nChoices:\n(A) a\n(B) b\n(C) c\n(D) d\n\n"
FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'


def test_longbench_zero_shot():
    item = make_item()
    assert ZERO_SHOT.render(item.context, item.values).text == (
        f"Please read the following text and answer the question below.\n\n<text>\nDOC\n</text>\n\n{QUESTION}{FORMAT}"
    )


def test_longbench_retrieved_differs_in_words_and_context_only():
    item = make_item()
    long = ZERO_SHOT.render("DOC", item.values)
    retrieved = ZERO_SHOT.render("PARTS", item.values, retrieved=True)
    assert retrieved.before == (
        "Please read the following retrieved text chunks and answer the question below.\n\n<text>\n"
    )
    assert retrieved.after == long.after
    assert retrieved.context == "PARTS"


def test_longbench_two_stages():
    item = make_item()
    first = COT.render("DOC", item.values).text
    assert first.startswith("Please read the following text and answer the questions below.\n\n<text>\nDOC\n")
    assert first.endswith(f"{QUESTION}Let’s think step by step:")
    second = COT_ANSWER.render("", {**item.values, "cot": "I $Q$ think"}).text
    assert second == (
        "Please read the following text and answer the questions below.\n\n"
        "The text is too long and omitted here.\n\n"
        f"{QUESTION}Let’s think step by step: I $Q$ think\n\n"
        f"Based on the above, what is the single, most likely answer choice? {FORMAT}"
    )


def test_longbench_no_context():
    item = make_item()
    assert NO_CONTEXT.render("", item.values).text == (
        f"{QUESTION}What is the single, most likely answer choice? {FORMAT}"
    )


def test_infinitebench():
    item = make_item()
    prompts = {name: form.template.render("DOC", item.values) for name, (_, _, form) in INFINITEBENCH.items()}
    assert prompts["en_qa"].text == (
        "Read the book below and answer a question.\n\nDOC\n\nQuestion: Q?\n\nBe very concise."
    )
    assert prompts["en_mc"].text == (
        "Read the book and answer the question.\n\nDOC\n\nQuestion: Q?\n\nOnly one of the following options is "
        "correct, tell me the answer using one single letter (A, B, C, or D). Don't say anything else.\n"
        "A. a\nB. b\nC. c\nD. d"
    )
    assert prompts["en_sum"].text == "Summarize the following book.\n\nDOC"
    assert {prompt.system for prompt in prompts.values()} == {"You are a helpful assistant."}
    tokens = {name: form.max_new_tokens for name, (_, _, form) in INFINITEBENCH.items()}
    assert tokens == {"en_qa": 40, "en_mc": 40, "en_sum": 1200}


@pytest.mark.parametrize("metric", sorted(FORMS))
def test_a_document_that_looks_like_a_prompt_changes_nothing_around_it(metric):
    item = make_item(metric=metric)
    task = Task("t", (item, make_item(HOSTILE, metric, id="hostile")), FORMS)
    plain, hostile = (task.prompt(item) for item in task.items)
    assert hostile.context == HOSTILE
    assert (hostile.before, hostile.after) == (plain.before, plain.after)
    assert task.retrieved_prompt(item, HOSTILE).context == HOSTILE


def test_a_question_that_looks_like_a_prompt_stays_text():
    item = make_item(question=HOSTILE, choices=("$question", "${choice_a}", "c", "d"))
    after = ZERO_SHOT.render("DOC", item.values).after
    assert HOSTILE in after
    assert "(A) $question\n(B) ${choice_a}\n" in after


def test_questions_on_one_document_share_everything_before_it():
    task = Task("t", tuple(make_item(metric=m, id=m) for m in sorted(FORMS)), FORMS)
    shared = {task.prompt(item).before for item in task.items if item.metric != "string_match_part"}
    assert len(shared) == 1


def test_one_stage_tasks_have_no_second_prompt():
    task = sample()
    with pytest.raises(InvalidParameter, match="one stage"):
        task.answer_prompt(task.items[0], "thought")


def test_query_has_the_choices():
    assert make_item().query == "Q?\na\nb\nc\nd"


def test_a_template_that_names_what_an_item_lacks_is_an_error():
    with pytest.raises(KeyError):
        PromptTemplate("$missing", "").render("", {})
