"""The adapter for lm-evaluation-harness, with the harness itself where it is there (pip install lm-eval==0.4.13)."""

import importlib.util
import json

import pytest

from rapid.errors import InvalidParameter, RapidError
from rapid.integrations import lm_eval as adapter

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install lm-eval==0.4.13"
)
# The harness and what it imports warn about their own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")

STORY = "The fox lives in the den.\nThe owl lives in the tree.\nThe cow lives in the barn."
ROWS = [
    {"context": STORY, "question": "Where does the fox live?", "choices": ["den", "tree"], "answer": "den"},
    {"context": STORY, "question": "Where does the owl live?", "choices": ["den", "tree"], "answer": "tree"},
    {"context": STORY[::-1], "question": "Is it reversed?", "choices": ["yes", "no"], "answer": "yes"},
]
TASK = """
task: stories
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "Read:\\n{{{{context}}}}\\n\\nQuestion: {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
gen_prefix: "Answer:"
generation_kwargs:
  until: ["zzz"]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
"""


# -- taking a prompt apart --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "context", "parts"),
    [
        ("Read: A B\n\nWhy?", "A B", ("Read: ", "A B", "\n\nWhy?")),
        ("A B and A B\nWhy?", "A B", ("", "A B and A B\n", "Why?")),  # twice: it could be either
        ("Long text.\nMore.\nWhy?\n", None, ("", "Long text.\nMore.\n", "Why?\n")),
        ("Why?", None, ("", "Why?", "")),
        ("\n\nWhy?", "", ("", "\n\nWhy?", "")),
    ],
)
def test_a_prompt_is_document_and_question(message, context, parts):
    assert adapter.split(message, context) == parts
    assert "".join(parts) == message


def test_generation_arguments_get_our_names():
    assert adapter._own_names(
        {"until": ["\n", ""], "max_gen_toks": 5, "do_sample": False, "temperature": 1, "eta": 3}
    ) == {
        "stop": ("\n",),
        "max_new_tokens": 5,
        "temperature": 0.0,
        "eta": 3,
    }
    assert adapter._own_names({"until": "x", "do_sample": True}) == {"stop": ("x",), "temperature": 1.0}


def test_retrieval_is_by_the_rows_question_and_choices():
    assert adapter._query(ROWS[0], "rest") == "Where does the fox live?\nden\ntree"
    assert adapter._query({"question": "Why?"}, "rest") == "Why?"
    assert adapter._query({"input": "all of it"}, "rest") == "rest"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_the_harness_one_line_says_what_to_install():
    with pytest.raises(RapidError, match="pip install lm-eval"):
        adapter.RapidLM()


# -- in the harness ---------------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_engine):
    return adapter.RapidLM(engine=tiny_engine, ranking="bm25", method="rapid", eta=10)


@pytest.fixture
def stories(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "stories.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    return tmp_path


def evaluate(model, tasks, folder=None, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder) if folder else None, metadata=options.pop("metadata", None))
    return lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)


@needs_harness
@pytest.mark.parametrize("chat", [True, False])
def test_answers_are_those_of_a_session(model, stories, tiny_engine, chat):
    """Against the prompt in one piece: text -> chat template -> answer prefix; every answer by its own session."""
    import rapid

    found = evaluate(model, ["stories"], stories, apply_chat_template=chat, gen_kwargs="eta=20,law=transfer")
    answers = {sample["doc"]["question"]: sample["resps"][0][0] for sample in found["samples"]["stories"]}
    engine = tiny_engine if chat else adapter._without_chat_template(tiny_engine)
    for row in ROWS:
        prefix = "Answer:" if chat else ""
        after = f"\n\nQuestion: {row['question']}" + ("" if chat else " Answer:")
        template = rapid.engine.Template(opening="Read:\n", middle="", answer_prefix=prefix)
        session = engine.open(
            rapid.Document(row["context"]), template=template, retrieval=rapid.Retrieval(ranking="bm25")
        )
        answer = session.ask(
            after,
            query="\n".join((row["question"], *row["choices"])),
            speculation=rapid.Speculation(eta=20, law="transfer"),
            sampling=rapid.Sampling(max_new_tokens=8, stop=("zzz",)),
        )
        assert answers[row["question"]] == answer.text
        tokenizer = tiny_engine.backend.target.tokenizer
        text = f"Read:\n{row['context']}{after}"
        if chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + prefix
        asked = engine.target_prompter.encode(row["context"], after, retrieved=False, template=template)
        assert asked == tokenizer(text, add_special_tokens=False)["input_ids"]


@needs_harness
def test_stock_ruler_runs_offline(model, tiny_model_dir, monkeypatch):
    from lm_eval.tasks.ruler import niah_utils

    monkeypatch.setattr(niah_utils, "download_dataset", _first_rows(niah_utils.download_dataset))
    found = evaluate(
        model,
        ["niah_single_1"],
        metadata={"tokenizer": tiny_model_dir, "max_seq_lengths": [1500]},
        apply_chat_template=True,
        limit=2,
    )
    samples = found["samples"]["niah_single_1"]
    assert len(samples) == 2
    assert all(sample["resps"][0][0] for sample in samples)


def _first_rows(download):
    """Two of the 500 samples a length: making them all takes longer than the test may."""
    import itertools

    return lambda lists: download(itertools.islice(rows, 2) for rows in lists)


@needs_harness
def test_what_cannot_be_done_is_refused(model, tiny_engine, stories):
    with pytest.raises(InvalidParameter, match="beam_size is no setting of rapid"):
        evaluate(model, ["stories"], stories, gen_kwargs="beam_size=2")
    with pytest.raises(InvalidParameter, match="num_beams is no setting of rapid"):
        adapter.RapidLM(engine=tiny_engine, num_beams=2)
    with pytest.raises(InvalidParameter, match="eta must be"):
        adapter.RapidLM(engine=tiny_engine, eta=-1)
    with pytest.raises(InvalidParameter, match="without --fewshot_as_multiturn"):
        adapter._messages(model.apply_chat_template([{"role": "user", "content": "a"}] * 2))
    for refused in (model.loglikelihood, model.loglikelihood_rolling):
        with pytest.raises(RapidError, match="generate_until"):
            refused([])


@needs_harness
def test_the_harness_knows_the_model_by_name():
    from lm_eval.api.registry import get_model

    assert get_model("rapid") is adapter.RapidLM
    assert get_model("hf") is not None  # its own models are still there


@needs_harness
def test_a_long_document_loses_its_middle_and_keeps_question_and_prefix(model, tiny_engine):
    from lm_eval.api.instance import Instance

    prompt = model.apply_chat_template(
        [{"role": "user", "content": "word " * 1000 + "\nWhy?"}, {"role": "assistant", "content": "Because"}]
    )
    request = Instance("generate_until", {"input": "x"}, (prompt, {"max_gen_toks": 4}), 0)
    assert len(model.generate_until([request], disable_tqdm=True)[0]) == 4
