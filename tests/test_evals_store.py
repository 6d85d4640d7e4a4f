"""Run directories: killed anywhere, resumed, the same file in the end."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.errors import DocumentError, InvalidParameter
from rapid.evals.configuration import Configuration, Key, grid
from rapid.evals.manifest import make_manifest
from rapid.evals.results import Result, Timing, parse_line
from rapid.evals.store import RunStore, read_run

MANIFEST = {
    "settings": {"temperature": 0.0, "etas": [5, 10]},
    "models": {"target": "aa"},
    "data": {"t": "bb"},
    "environment": {"python": "3"},
}
PLAN = [
    Key("t", item, configuration)
    for item in ("b", "a", "Ω\u2028\x85")
    for configuration in grid(["lc", "rag", "sd", "rapid"], etas=[5.0, 10.0], laws=["paper", "transfer"])
]


def answer(key, decode_s=0.1):
    """What a deterministic runner would answer, line breaks of every kind included."""
    return Result(
        *key,
        metric="qa_f1",
        score=(len(repr(key)) % 7) / 7,
        prediction=f"{key.item}\n\u2028{key.configuration.label}\r",
        finish_reason="stop",
        prompt_tokens=10,
        splits={"length": "short"},
        retrieved=((0, 5), (9, 12)),
        timing=Timing(decode_s=decode_s),
    )


def without_timing(path):
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["timing"]
    return rows


def run_all(directory, plan=PLAN, stop_after=None, decode_s=0.1):
    done = []
    with RunStore(directory, MANIFEST) as store:
        for key in store.missing(plan)[:stop_after]:
            store.append(answer(key, decode_s))
            done.append(key)
        if stop_after is None:
            store.finish(plan, [])
    return done


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    run_all(directory)
    return without_timing(directory / "items.jsonl")


@settings(max_examples=40, deadline=None)
@given(kills=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 700)), min_size=1, max_size=10))
def test_a_run_killed_anywhere_ends_in_the_same_file(tmp_path_factory, uninterrupted, kills):
    """Each kill comes after some items, at any byte of what was written before it."""
    directory = tmp_path_factory.mktemp("killed")
    path = directory / "items.jsonl"
    for items, lost in kills:
        run_all(directory, stop_after=items, decode_s=lost)
        os.truncate(path, max(0, path.stat().st_size - lost))
    finished = {result.key for result in read_run(directory).results}
    assert run_all(directory) == [key for key in PLAN if key not in finished]
    assert without_timing(path) == uninterrupted
    assert run_all(directory) == []
    assert without_timing(path) == uninterrupted


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from test_evals_store import MANIFEST, PLAN, answer
from rapid.evals.store import RunStore
with RunStore({directory!r}, MANIFEST) as store:
    print("open", flush=True)
    for key in store.missing(PLAN):
        store.append(answer(key))
        print(key.item, flush=True)
        {then}
"""


@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
def test_kill_9_loses_nothing_that_was_reported_and_frees_the_directory(tmp_path, uninterrupted):
    script = CHILD.format(
        tests=os.path.dirname(__file__), directory=str(tmp_path), then="if len(store.results) == 3: sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines = [child.stdout.readline() for _ in range(4)]
    assert lines[0] == "open\n"
    with pytest.raises(InvalidParameter, match="in use by another run"):
        RunStore(tmp_path, MANIFEST)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert len(run_all(tmp_path)) == len(PLAN) - 3
    assert without_timing(tmp_path / "items.jsonl") == uninterrupted


def test_half_written_last_line_and_a_missing_item(tmp_path):
    """Case B39: the last line is half written and the second item is missing."""
    run_all(tmp_path)
    path = tmp_path / "items.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1]
    del lines[1]
    path.write_bytes(b"\n".join(lines)[:-20])
    assert run_all(tmp_path) == [PLAN[1], PLAN[-1]]
    assert len(without_timing(path)) == len(PLAN)


def test_zeros_of_a_crashed_machine_are_dropped(tmp_path):
    run_all(tmp_path, stop_after=3)
    with (tmp_path / "items.jsonl").open("ab") as file:
        file.write(b"\0" * 50 + b"\n")
    with RunStore(tmp_path, MANIFEST) as store:
        assert len(store.missing(PLAN)) == len(PLAN) - 3
        store.append(answer(PLAN[5]))
    assert len(read_run(tmp_path).results) == 4


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    run_all(tmp_path)
    path = tmp_path / "items.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[2] = b'{"task": "t"}'
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DocumentError, match="line 3 is not a result"):
        RunStore(tmp_path, MANIFEST)
    lines.pop(2)
    path.write_bytes(b"\n".join(lines))
    assert run_all(tmp_path) == [PLAN[2]]  # and the lock was freed by the failure


def test_doubles_are_refused_and_planned_once(tmp_path):
    with RunStore(tmp_path, MANIFEST) as store:
        store.append(answer(PLAN[0]))
        with pytest.raises(ValueError, match="already finished"):
            store.append(answer(PLAN[0]))
        assert store.missing([PLAN[0], PLAN[1], PLAN[1]]) == [PLAN[1]]
    assert len(read_run(tmp_path).results) == 1


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("settings", "temperature", 1.0, r"settings\.temperature = 0\.0, not 1\.0"),
        ("settings", "new", 1, r"settings\.new = null, not 1"),
        ("models", "target", "cc", r'models\.target = "aa", not "cc"'),
        ("data", "t", "dd", r'data\.t = "bb", not "dd"'),
    ],
)
def test_another_run_is_refused_and_the_difference_named(tmp_path, part, name, value, message):
    run_all(tmp_path, stop_after=1)
    other = {**MANIFEST, part: {**MANIFEST[part], name: value}}
    with pytest.raises(InvalidParameter, match=message):
        RunStore(tmp_path, other)


def test_another_environment_is_the_same_run(tmp_path):
    run_all(tmp_path, stop_after=1)
    # tuples come back from JSON as lists
    same = {**MANIFEST, "environment": {}, "settings": {"temperature": 0.0, "etas": (5, 10)}}
    with RunStore(tmp_path, same) as store:
        assert len(store.results) == 1
    assert read_run(tmp_path).manifest["environment"] == {"python": "3"}


def test_directories_that_are_no_runs(tmp_path):
    with pytest.raises(DocumentError, match=r"manifest\.json is missing"):
        read_run(tmp_path)
    (tmp_path / "items.jsonl").write_text("{}\n")
    with pytest.raises(InvalidParameter, match="no manifest"):
        RunStore(tmp_path, MANIFEST)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DocumentError, match="cannot be read"):
        RunStore(tmp_path, MANIFEST)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameter, match="cannot be made"):
        RunStore(tmp_path / "file", MANIFEST)


def test_lines_round_trip():
    result = replace(answer(PLAN[-1]), reasoning="first\nthen", truncated=True)
    assert "\n" not in result.line()
    assert parse_line(result.line()) == result


def test_grid_varies_only_what_makes_a_difference():
    made = grid(["lc", "rag", "sd", "rapid"], etas=[5.0, 10.0, 20.0], laws=["paper", "transfer"])
    assert len(made) == 3 + 6
    assert made[0] == Configuration("lc", seed=0)
    assert made[2] == Configuration("sd", 0.0, "exact", None, 10, seed=0)
    budgets = grid(["lc", "rag", "rapid"], etas=[5.0], context_budgets=[1024, 2048])
    assert [c.context_budget for c in budgets] == [None, 1024, 2048, 1024, 2048]
    assert len(grid(["rapid"], etas=[5.0, 10.0], laws=["exact"])) == 1
    assert len(grid(["lc"], seeds=[0, 1])) == 2
    labels = [c.label for c in grid(["lc", "rapid"], etas=[5.0], alphas=[0.2], num_draft_tokens=None)]
    assert labels == ["lc", "rapid η=5 paper α=0.2 γ=auto"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["lcc"]}, "method must be one of"),
        ({"methods": ["rapid"], "laws": ["best"]}, "law must be one of"),
        ({"methods": ["rapid"], "etas": [-1.0]}, "eta must be"),
        ({"methods": ["rapid"], "alphas": [2.0]}, "alpha must be"),
    ],
)
def test_bad_grids_are_refused(arguments, message):
    with pytest.raises(InvalidParameter, match=message):
        grid(**arguments)


def test_manifest_tells_versions_and_hardware():
    manifest = make_manifest(settings={"a": 1}, models={}, data={})
    assert manifest["environment"]["packages"]["numpy"]
    assert manifest["environment"]["cores"] >= 1
    json.dumps(manifest)
