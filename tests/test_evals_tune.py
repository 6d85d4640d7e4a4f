"""Tuning: chosen on some documents, reported on the others, never on an item it was chosen by."""

import json
from dataclasses import replace

import pytest

from rapid.cli.main import run as command
from rapid.errors import InvalidParameter
from rapid.evals.asking import AskSettings
from rapid.evals.configuration import Configuration, grid
from rapid.evals.manifest import make_manifest
from rapid.evals.readings import group
from rapid.evals.results import Result
from rapid.evals.runner import RunOptions
from rapid.evals.schema import Item, Task
from rapid.evals.store import RunStore, read_run
from rapid.evals.tasks.jsonl import FORMS
from rapid.evals.tune import default_configuration, rank, split, tune
from rapid.params import Retrieval

CANDIDATES = grid(["rapid"], etas=[5.0, 20.0], laws=["paper", "transfer"])
OPTIONS = RunOptions(AskSettings(Retrieval(ranking="bm25"), max_new_tokens=3))
TASK = Task(
    "t",
    tuple(
        Item(f"{story}-{question}", f"Story {story}. The fox sleeps.", f"{question}?", ("fox",), "qa_f1")
        for story in range(8)
        for question in ("Who", "What")
    ),
    FORMS,
)


def result(item, configuration, score, metric="qa_f1", accepted=1):
    return Result("t", item, configuration, metric, score, "x", "stop", 1, drafted=2, accepted=accepted)


def test_the_split_is_by_document_and_the_same_in_every_order():
    readings = group([TASK])
    parts = split(readings)
    assert {r.context for r in parts.tuning}.isdisjoint(r.context for r in parts.held_out)
    assert len(parts.tuning) + len(parts.held_out) == 8
    assert all(len(reading.questions) == 2 for reading in parts.tuning)
    again = split(readings[::-1])
    assert {r.context for r in again.tuning} == {r.context for r in parts.tuning}
    renamed = split(group([replace(TASK, name="u", items=TASK.items[::2])]))
    assert {r.context for r in renamed.tuning} == {r.context for r in parts.tuning}


def test_the_split_keeps_its_fraction():
    items = tuple(Item(str(n), f"Document {n}", "?", ("a",), "qa_f1") for n in range(2000))
    readings = group([Task("t", items, FORMS)])
    # 2,000 documents at 0.3: a standard deviation is 20, so five of them are passed by one hash in two million.
    assert abs(len(split(readings, 0.3).tuning) - 600) < 100


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 2])
def test_a_split_with_an_empty_part_is_refused(fraction):
    with pytest.raises(InvalidParameter, match="between 0 and 1"):
        split(group([TASK]), fraction)
    with pytest.raises(InvalidParameter, match="too few"):
        split(group([TASK])[:1])


def test_the_best_mean_over_tasks_and_metrics_wins():
    low, high = CANDIDATES[:2]
    results = [result(str(n), c, s) for n in range(9) for c, s in ((low, 0.5), (high, 0.6))]
    assert [t.configuration for t in rank(results, CANDIDATES)] == [replace(high, seed=None), replace(low, seed=None)]
    # One summary weighs as much as nine questions: metrics are averaged, not items.
    results += [result("s", c, s, "rougeLsum") for c, s in ((low, 0.9), (high, 0.1))]
    best = rank(results, CANDIDATES)[0]
    assert best.configuration == replace(low, seed=None)
    assert best.score == pytest.approx(0.7)


def test_ties_go_to_the_higher_acceptance_then_to_the_first():
    low, high = CANDIDATES[:2]
    tied = [result("a", low, 0.5, accepted=1), result("a", high, 0.5, accepted=2)]
    assert rank(tied, CANDIDATES)[0].configuration.eta == high.eta
    tied[0] = result("a", low, 0.5, accepted=2)
    assert rank(tied, CANDIDATES)[0].configuration.eta == low.eta


def test_tuning_never_looks_at_the_held_out_part(tmp_path, tiny_engine):
    """Held-out results that praise another candidate change nothing; tuning results that do, do."""
    readings = group([TASK])
    parts = split(readings)
    praised = CANDIDATES[3]

    def chosen(directory, praise):
        with RunStore(directory, make_manifest(settings={}, models={}, data={})) as store:
            for reading in praise:
                for question in reading.questions:
                    store.append(result(question.item.id, praised, 1.0))
            default = default_configuration(tiny_engine)
            return tune(tiny_engine, store, readings, CANDIDATES, default, OPTIONS)

    report = chosen(tmp_path / "a", [])
    assert chosen(tmp_path / "b", parts.held_out)["chosen"] == report["chosen"]
    assert chosen(tmp_path / "c", parts.tuning)["chosen"] == replace(praised, seed=None).as_dict()

    assert json.loads((tmp_path / "a" / "tuning.json").read_text()) == report
    assert report["documents"] == {"tuning": len(parts.tuning), "held_out": len(parts.held_out)}
    held_out = {q.item.id for reading in parts.held_out for q in reading.questions}
    rows = {(row["method"], row["eta"]): row["n"] for row in report["held_out"]}
    assert set(rows.values()) == {len(held_out)}
    assert rows.keys() >= {
        ("lc", None),
        ("rag", None),
        ("sd", 0.0),
        ("rapid", 10.0),
        ("rapid", report["chosen"]["eta"]),
    }
    candidates = {replace(candidate, seed=None) for candidate in CANDIDATES}
    for line in read_run(tmp_path / "a").results:
        if line.item in held_out and replace(line.configuration, seed=None) in candidates:
            assert replace(line.configuration, seed=None) == Configuration(**report["chosen"])
    assert {row["against"] for row in report["gains"]} >= {"lc", "rag", "sd", "rapid η=10 paper"}


def test_a_deadline_stops_and_the_next_call_goes_on(tmp_path, tiny_engine):
    with RunStore(tmp_path, make_manifest(settings={}, models={}, data={})) as store:
        arguments = (tiny_engine, store, group([TASK]), CANDIDATES, default_configuration(tiny_engine))
        assert tune(*arguments, replace(OPTIONS, deadline=0.0)) is None
        assert not (tmp_path / "tuning.json").exists()
        assert tune(*arguments, OPTIONS) is not None


def test_the_command(tmp_path, tiny_model_dir, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"id": i.id, "context": i.context, "question": i.question, "answers": ["a"], "metric": "qa_f1"})
            for i in TASK.items[::2]
        )
    )
    arguments = ["eval", "tune", "--output", str(tmp_path / "out"), "--task", str(path), "--target", tiny_model_dir]
    arguments += ["--ranking", "bm25", "--max-new-tokens", "4", "--eta", "5,20", "--law", "paper"]
    arguments += ["--num-draft-tokens", "2,4", "--alpha", "0.1,0.5"]
    assert command([*arguments, "--time-limit", "0"]) == 0
    assert "the same command goes on" in capsys.readouterr().err
    assert command([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["candidates"]) == 8
    assert report["left"] is False
    assert command(arguments) == 0
    assert capsys.readouterr().out.startswith("chosen: rapid η=")
