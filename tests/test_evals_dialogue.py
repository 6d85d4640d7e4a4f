"""Long dialogues, and the judge of their answers, with an OpenAI-compatible server of our own."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rapid.cli.main import run as command
from rapid.errors import DocumentError, InvalidParameter, RapidError
from rapid.evals.judge import Endpoint, judge, judge_prompt, parse_rating
from rapid.evals.questions import Asked
from rapid.evals.store import read_run
from rapid.evals.tasks.dialogue import dialogues, passage
from rapid.evals.tasks.registry import TaskOptions, load_task

ROWS = [
    {
        "id": f"{story}-{what}",
        "context": f"The {animal} of story {story} lives in the {place}.\n" + f"It rains on day {story}.\n" * 5,
        "question": f"Where does the {animal} live?" if what == "q" else "Summarise the story.",
        "answers": [f"in the {place}"],
        "metric": "qa_f1" if what == "q" else "rougeLsum",
    }
    for story, (animal, place) in enumerate([("fox", "den"), ("owl", "tree"), ("cow", "barn"), ("pig", "sty")])
    for what in "qs"
]


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def make(path, **changes):
    return dialogues(path, **{"length": 900, "count_tokens": len, "num_samples": 500, "seed": 1, **changes})


# -- dialogues --------------------------------------------------------------------------------------------------


def test_the_last_questions_document_is_in_a_history_of_mixed_turns(rows_file):
    task = make(rows_file)
    originals = {f"dialogue-{row['id']}": row for row in ROWS}
    assert {item.id for item in task.items} == originals.keys()
    places = set()
    for item in task.items:
        row = originals[item.id]
        turns = item.context.split("User: ")[1:]
        assert len(turns) >= 4
        assert all("\n\nAssistant: " in turn for turn in turns)
        own = [number for number, turn in enumerate(turns) if row["context"] in turn]
        assert len(own) == 1
        places.add(own[0])
        others = [turn for number, turn in enumerate(turns) if number not in own]
        assert not any(f"story {row['id'][0]}" in turn for turn in others)
        assert len(item.context) <= 900
        assert (item.question, item.answers) == (row["question"], tuple(row["answers"]))
        assert f"{row['question']}\n\nAssistant: {row['answers'][0]}" not in item.context  # it is not given away
        prompt = task.prompt(item)
        assert prompt.after == f"\n\nThe user goes on: {item.question}"
    assert len(places) > 1


def test_dialogues_are_the_same_for_a_seed_and_others_for_another(rows_file):
    assert make(rows_file).data_hash() == make(rows_file).data_hash() != make(rows_file, seed=2).data_hash()
    assert len(make(rows_file, num_samples=3).items) == 3


def test_a_length_no_document_fits_is_refused(rows_file):
    with pytest.raises(DocumentError, match="raise length"):
        make(rows_file, length=100)


def test_the_passage_of_a_turn_is_the_one_that_answers_it(rows_file):
    item = make(rows_file, num_samples=1).items[0]
    lines = [f"Line {n} says nothing of interest at all to anybody here." for n in range(100)]
    lines[60] = "The zeppelin landed beside the lighthouse."
    from dataclasses import replace

    asked = replace(item, context="\n".join(lines), question="Where did the zeppelin land?", answers=("lighthouse",))
    assert lines[60] in passage(asked)
    assert len(passage(asked).split()) <= 240


def test_the_shipped_sample_makes_dialogues():
    task = load_task("dialogue", TaskOptions(count_tokens=lambda text: len(text.split()), num_samples=2))
    assert [item.metric for item in task.items]
    with pytest.raises(InvalidParameter, match="count_tokens"):
        load_task("dialogue")


# -- the judge --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("Good. Rating: [[7]]", 7),
        ("[[10]]", 10),
        ("First [[3]], on reflection [[4]].", 4),
        ("[[ 5.0 ]]", 5),
        ("[[11]]", None),
        ("[[0]]", None),
        ("Rating: 7", None),
        ("", None),
    ],
)
def test_ratings(text, rating):
    assert parse_rating(text) == rating


def test_the_prompt_is_filled_in_once():
    prompt = judge_prompt(Asked("t", "i", "Why $answer?", ("$question",)), "[[10]] $reference ${x}")
    assert "[Question]\nWhy $answer?\n" in prompt
    assert "[Reference answer]\n$question\n" in prompt
    assert "[The assistant's answer]\n[[10]] $reference ${x}\n" in prompt


class Judge(BaseHTTPRequestHandler):
    """Replies with a rating that depends on the seed; keeps what it was asked."""

    asked: list = []  # noqa: RUF012  one list of all requests is what is wanted
    reply = "Fine. Rating: [[{}]]"
    status = 200

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers.get("Authorization"), body))
        content = {"choices": [{"message": {"content": self.reply.format(7 + body["seed"])}}]}
        answer = json.dumps(content if self.status == 200 else {"error": "no"}).encode()
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """The base URL of a local judge, and its handler to ask and to change."""
    handler = type("OneJudge", (Judge,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/v1", handler
        http.shutdown()
        thread.join()


@pytest.fixture
def dialogue_run(tmp_path, rows_file, tiny_model_dir):
    arguments = ["eval", "run", "--output", str(tmp_path / "run"), "--task", f"dialogue:{rows_file}"]
    arguments += ["--target", tiny_model_dir, "--ranking", "bm25", "--methods", "lc,rapid", "--limit", "2"]
    assert command([*arguments, "--length", "900", "--max-new-tokens", "5"]) == 0
    return tmp_path / "run"


def test_dialogues_are_run_and_judged(dialogue_run, server, monkeypatch, capsys):
    url, handler = server
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    arguments = ["eval", "judge", str(dialogue_run), "--base-url", url, "--model", "judge-1", "--votes", "3"]
    assert command([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["method"], row["rating"], row["n"], row["unrated"]) for row in rows] == [
        ("lc", 8.0, 2, 0),
        ("rapid", 8.0, 2, 0),
    ]
    results = read_run(dialogue_run).results
    assert len(handler.asked) == 3 * len(results) == 12
    for path, authorization, body in handler.asked:
        assert path == "/v1/chat/completions"
        assert authorization == "Bearer secret"
        assert (body["model"], body["temperature"]) == ("judge-1", 0.0)
    kept = [json.loads(line) for line in (dialogue_run / "judgements.jsonl").read_text().splitlines()]
    assert [k["prompt"] for k in kept] == [body["messages"][0]["content"] for _, _, body in handler.asked[::3]]
    assert all(result.prediction in k["prompt"] for result, k in zip(results, kept, strict=True))
    assert kept[0]["votes"][2] == {"rating": 9, "text": "Fine. Rating: [[9]]"}
    assert "secret" not in (dialogue_run / "judge.json").read_text()
    assert command(arguments) == 0  # nothing is asked twice
    assert len(handler.asked) == 12


def test_a_judge_that_fails_loses_no_vote(dialogue_run, server, capsys):
    url, handler = server
    endpoint = Endpoint(url, "j")
    judge(dialogue_run, endpoint)
    whole = (dialogue_run / "judgements.jsonl").read_bytes()
    (dialogue_run / "judgements.jsonl").write_bytes(whole[: len(whole) // 2])  # killed while it wrote
    handler.status = 500
    with pytest.raises(RapidError, match="does not answer"):
        judge(dialogue_run, endpoint)
    handler.status = 200
    judge(dialogue_run, endpoint)
    assert (dialogue_run / "judgements.jsonl").read_bytes() == whole


def test_replies_without_a_rating_are_counted(dialogue_run, server):
    url, handler = server
    handler.reply = "I would rather not."
    rows = judge(dialogue_run, Endpoint(url, "j"))
    assert [(row["rating"], row["n"], row["unrated"]) for row in rows] == [(None, 0, 2)] * 2


def test_bad_endpoints_are_one_line(dialogue_run, server, capsys):
    url, handler = server
    capsys.readouterr()
    common = ["eval", "judge", str(dialogue_run), "--model", "j", "--base-url"]
    assert command([*common, "localhost:1"]) == 2
    assert "must begin with http" in capsys.readouterr().err
    assert command([*common, "http://127.0.0.1:9/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err
    handler.reply = None
    type.__setattr__(handler, "do_POST", lambda self: (self.send_response(200), self.end_headers()))
    assert command([*common, url]) == 2
    assert "does not answer as OpenAI's API does" in capsys.readouterr().err
