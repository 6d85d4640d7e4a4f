"""Loaders on local files in the hub's own formats, the shipped sample, and what bad files give."""

import json

import pytest

from rapid.errors import DocumentError, InvalidParameter
from rapid.evals.schema import Item, Task
from rapid.evals.tasks.jsonl import FORMS, jsonl_task, sample
from rapid.evals.tasks.registry import TASK_NAMES, TaskOptions, load_task


def longbench_row(number=0, **changes):
    row = {
        "_id": f"id{number}",
        "domain": "Single-Document QA",
        "sub_domain": "Literary",
        "difficulty": "hard",
        "length": "short",
        "question": " Who? ",
        "choice_A": "one",
        "choice_B": "two ",
        "choice_C": "three",
        "choice_D": "four",
        "answer": "B",
        "context": "\n A $Q$ document.\u2028More. \n",
    }
    return {**row, **changes}


def infinitebench_row(number, kind):
    choice = kind == "choice"
    return {
        "id": number,
        "context": "A book.",
        "input": "" if kind == "sum" else "Who?",
        "answer": ["two"] if choice else ["first", "second"],
        "options": ["one", "two", "three", "four"] if choice else [],
    }


def own_row(**changes):
    row = {
        "id": "x",
        "context": "Text.",
        "question": "Who?",
        "answers": ["Ann"],
        "choices": None,
        "answer_letter": None,
        "source": "here",
        "license": "CC0",
        "tokens": 2,
        "metric": "qa_f1",
    }
    return {**row, **changes}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_longbench_from_local_files(tmp_path, suffix):
    rows = [longbench_row(0), longbench_row(1, answer="D", difficulty="easy")]
    path = tmp_path / f"data.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif suffix == "jsonl":
        write_jsonl(path, rows)
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    task = load_task(f"longbench_v2:{path}")
    first, second = task.items
    assert (first.id, first.question, first.choices) == ("id0", "Who?", ("one", "two", "three", "four"))
    assert first.context == "A $Q$ document.\u2028More."
    assert (first.answer_letter, first.answers, second.answer_letter) == ("B", ("two",), "D")
    assert task.split_values(second) == {"difficulty": "easy", "length": "short"}
    assert task.score(first, "The correct answer is (B)") == 1.0
    assert task.form(first).max_new_tokens == 128


def test_longbench_modes(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [longbench_row()])
    cot = load_task(f"longbench_v2_cot:{path}")
    item = cot.items[0]
    assert cot.form(item).max_new_tokens == 1024
    assert cot.form(item).second_stage.max_new_tokens == 128
    second = cot.answer_prompt(item, "  because  ")
    assert "step by step: because\n\n" in second.text
    assert "document" not in second.text
    bare = load_task(f"longbench_v2_no_context:{path}")
    assert "document" not in bare.prompt(bare.items[0]).text
    lenient = load_task(f"longbench_v2:{path}", TaskOptions(extraction="lenient"))
    assert lenient.score(lenient.items[0], "So the correct answer is (B)") == 1.0
    assert cot.score(item, "So the correct answer is (B)") == 0.0


def test_infinitebench_from_a_folder_of_the_hubs_files(tmp_path):
    for name, kind in [("qa", "qa"), ("choice", "choice"), ("sum", "sum")]:
        write_jsonl(tmp_path / f"longbook_{name}_eng.jsonl", [infinitebench_row(i, kind) for i in range(2)])
    qa = load_task(f"infinitebench_en_qa:{tmp_path}")
    assert qa.items[0].answers == ("first", "second")
    assert qa.score(qa.items[0], "second") == 1.0
    mc = load_task(f"infinitebench_en_mc:{tmp_path / 'longbook_choice_eng.jsonl'}")
    assert mc.items[1].answer_letter == "B"
    assert mc.score(mc.items[1], "B") == 1.0
    summary = load_task(f"infinitebench_en_sum:{tmp_path}")
    assert summary.form(summary.items[0]).max_new_tokens == 1200
    assert summary.items[0].query


@pytest.mark.parametrize("prediction", ["", "  \n"])
def test_empty_answers_are_wrong_in_every_task(prediction):
    for item in sample().items:
        assert sample().score(item, prediction) == 0.0


def test_the_hub_without_a_network_is_one_clear_error():
    with pytest.raises(DocumentError, match=r"data\.json of the dataset THUDM/LongBench-v2 cannot be fetched"):
        load_task("longbench_v2")
    with pytest.raises(DocumentError) as error:
        load_task("infinitebench_en_qa")
    assert "\n" not in str(error.value)
    assert "give its path" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "holds no items"),
        ("a.jsonl", '{"id": 1}\n{"id"\n', "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "item 1 must be a JSON object"),
        ("a.jsonl", json.dumps(own_row(question=None)), "question must be text"),
        ("a.jsonl", json.dumps(own_row(answers=[1])), "answers must be a list of strings"),
        ("a.jsonl", json.dumps(own_row(choices=["a", "b"])), "choices must be four texts, got 2"),
        ("a.jsonl", json.dumps(own_row(metric="mc_accuracy")), "needs choices"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DocumentError, match=message) as error:
        load_task(str(path))
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([own_row(), own_row()], "two items with id x"),
        ([own_row(metric="bleu")], "metric must be one of"),
        ([own_row(answers=[])], "no answers"),
        ([own_row(choices=list("abcd"), answer_letter="E")], "A, B, C or D"),
    ],
)
def test_bad_items_are_named(tmp_path, rows, message):
    with pytest.raises(InvalidParameter, match=message):
        load_task(str(write_jsonl(tmp_path / "a.jsonl", rows)))


def test_other_bad_sources(tmp_path):
    with pytest.raises(DocumentError, match="no such file"):
        load_task(str(tmp_path / "missing.jsonl"))
    with pytest.raises(InvalidParameter, match="task must be"):
        load_task("longbench_v3")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DocumentError, match="one JSON list"):
        load_task(f"longbench_v2:{tmp_path / 'a.json'}")
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(DocumentError, match="UTF-8"):
        load_task(str(tmp_path / "latin.jsonl"))
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(DocumentError, match=r"\.jsonl, \.json, \.parquet"):
        load_task(f"longbench_v2:{tmp_path / 'a.csv'}")
    rows = [longbench_row(answer="E")]
    with pytest.raises(DocumentError, match="row 1: answer must be A, B, C or D"):
        load_task(f"longbench_v2:{write_jsonl(tmp_path / 'b.jsonl', rows)}")


def test_own_files_are_tasks(tmp_path):
    task = load_task(str(write_jsonl(tmp_path / "mine.jsonl", [own_row(domain="law")])))
    assert task.name == "mine"
    assert task.split_values(task.items[0]) == {"domain": "law"}
    assert (task.items[0].license, task.items[0].tokens) == ("CC0", 2)


def test_limits_and_hashes(tmp_path):
    rows = [own_row(id=str(i)) for i in range(3)]
    task = jsonl_task(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [item.id for item in task.limited(2).items] == ["0", "1"]
    assert task.limited(None) is task
    with pytest.raises(InvalidParameter, match="at least 1"):
        task.limited(0)
    again = jsonl_task(write_jsonl(tmp_path / "b.jsonl", rows))
    assert again.data_hash() == task.data_hash()
    assert task.limited(2).data_hash() != task.data_hash()


def test_the_sample_is_what_it_says():
    task = sample()
    assert 30 <= len(task.items) <= 40
    assert {item.metric for item in task.items} == set(FORMS)
    assert len({item.metric for item in task.items[:4]}) == 4
    for item in task.items:
        assert item.source
        assert item.license
        assert 2700 <= item.tokens <= 8000
        if item.metric == "mc_accuracy":
            assert len(set(item.choices)) == 4
            assert task.score(item, item.answer_letter) == 1.0
        if item.metric == "string_match_part":
            assert item.answers[0] in item.context
        if item.metric != "rougeLsum":
            assert task.score(item, item.answers[0]) == 1.0


def test_ruler_needs_a_counter():
    assert len([name for name in TASK_NAMES if name.startswith("ruler_")]) == 13
    with pytest.raises(InvalidParameter, match="count_tokens"):
        load_task("ruler_vt")


def test_an_item_needs_an_id():
    with pytest.raises(InvalidParameter, match="empty id"):
        Item("", "", "", ("a",), "qa_f1")
    with pytest.raises(InvalidParameter, match="both choices"):
        Item("i", "", "", ("a",), "qa_f1", answer_letter="A")
    assert Task("t", (), FORMS).items == ()
