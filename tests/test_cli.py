"""The command line: the JSON contract, what goes to stdout and what to stderr, one clear line for every bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rapid
from rapid.cli import main as command
from rapid.cli.docs import render
from rapid.params import METHODS

TEXT = "\n\n".join(f"The {place} was built by the guild of {place}s." for place in ("mill", "tower", "bridge", "forge"))
RAPID = [sys.executable, "-c", "from rapid.cli.main import main; main()"]


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "report.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="session")
def tiny(tiny_model_dir: str) -> list[str]:
    """The options that make an answer of nonsense in no time."""
    return ["--target", tiny_model_dir, "--ranking", "bm25", "--max-new-tokens", "12"]


@pytest.fixture
def run(capsys):
    """Runs a command line in this process: (exit status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = command.run(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def process(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*RAPID, *arguments], capture_output=True, timeout=120, check=False, **options)


class TestAnswers:
    def test_the_answer_on_stdout_and_one_line_of_figures_on_stderr(self, run, document, tiny):
        status, out, err = run("ask", "Who built the forge?", document, *tiny)
        assert status == 0
        assert out.endswith("\n")
        assert len(out) == 13  # one character per token, and a line end
        (figures,) = err.splitlines()
        assert figures.startswith("[rapid] 12 tokens, ")
        for part in ("tokens/s", "acceptance 0.", "drafted)", "1 chunk retrieved", "first token after"):
            assert part in figures

    @pytest.mark.parametrize("method", METHODS)
    def test_json(self, run, document, tiny, method):
        status, out, err = run("ask", "Who built the forge?", document, *tiny, "--json", "--method", method)
        assert (status, err) == (0, "")
        assert out.count("\n") == 1
        report = json.loads(out)
        assert list(report) == [
            *("answer", "finish_reason", "method", "settings", "usage", "stats", "retrieved"),
            *("governor", "warnings"),
        ]
        assert isinstance(report["answer"], str)
        assert report["finish_reason"] == "length"
        assert report["method"] == method
        assert report["usage"].keys() == {"prompt_tokens", "draft_prompt_tokens", "completion_tokens"}
        assert report["usage"]["completion_tokens"] == 12
        assert report["stats"].keys() == {
            *("rounds", "drafted", "accepted", "acceptance_rate", "mean_acceptance_length"),
            *("load_s", "retrieval_s", "prefill_s", "draft_prefill_s", "decode_s", "decode_tokens_per_s", "ttft_s"),
            *("draft_s", "verify_s", "other_s"),
        }
        assert all(isinstance(value, int | float) and value >= 0 for value in report["stats"].values())
        page = render()
        assert all(f'"{key}"' in page for key in [*report, *report["usage"], *report["stats"]])
        assert report["settings"] | {"method": method, "max_new_tokens": 12} == report["settings"]
        drafted = {"rapid": 10, "sd": "auto", "lookup": "auto", "lc": 0, "rag": 0}
        assert report["settings"]["num_draft_tokens"] == drafted.get(method, "auto")
        assert bool(report["governor"]) == (drafted.get(method, "auto") == "auto")
        assert report["settings"].keys() >= {"target", "drafter", "eta", "law", "lossless", "temperature", "seed"}
        if method == "lc":
            assert report["retrieved"] == []
        for found in report["retrieved"]:
            assert found.keys() == {"document", "start", "end", "score"}
            assert found["document"] == document
            assert 0 <= found["start"] < found["end"] <= len(TEXT)

    def test_json_and_text_say_the_same(self, run, document, tiny):
        arguments = ("ask", "Who built the forge?", document, *tiny, "--temperature", "1", "--seed", "5")
        text, report = run(*arguments)[1], json.loads(run(*arguments, "--json")[1])
        assert report["answer"] + "\n" == text
        assert report["settings"]["seed"] == 5

    def test_lossless_is_the_target_alone(self, run, document, tiny):
        arguments = ("ask", "Who built the forge?", document, *tiny)
        answers = [run(*arguments, *options)[1] for options in (["--lossless"], ["--method", "lc"], [])]
        assert answers[0] == answers[1] != answers[2]
        settings = json.loads(run(*arguments, "--lossless", "--json")[1])["settings"]
        assert settings | {"eta": 0, "law": "exact", "lossless": True} == settings

    def test_options_reach_the_engine(self, run, document, tiny):
        numbers = {"--eta": 3, "--alpha": 0.2, "--num-draft-tokens": 4, "--chunk-tokens": 64, "--context-budget": 70}
        options = ["--law", "transfer", *(str(part) for option in numbers.items() for part in option)]
        report = json.loads(run("ask", "Who built the forge?", document, *tiny, "--json", *options, "--stop", "zz")[1])
        settings = report["settings"]
        wanted = {"eta": 3, "law": "transfer", "alpha": 0.2, "num_draft_tokens": 4, "stop": ["zz"], "lossless": False}
        assert settings | wanted == settings
        assert settings["retrieval"] | {"chunk_tokens": 64, "context_budget": 70} == settings["retrieval"]

    def test_several_documents_and_stdin(self, document, tiny):
        found = process(
            "ask", "Who built the lock?", "-", document, *tiny, "--json", input=b"The lock was built by Orla."
        )
        assert found.returncode == 0
        assert found.stderr == b""
        assert "stdin" in {r["document"] for r in json.loads(found.stdout)["retrieved"]}

    def test_a_cut_is_told_before_the_answer(self, run, tmp_path, tiny):
        path = tmp_path / "long.txt"
        path.write_text(TEXT * 20)
        status, out, err = run("ask", "Who built the forge?", str(path), *tiny)
        note, figures = err.splitlines()
        assert status == 0
        assert len(out) == 13
        assert note.startswith("rapid: note: the document has ")
        assert figures.startswith("[rapid] 12 tokens")

    def test_a_terminal_that_lacks_a_character(self, document, tiny):
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        options = ["--stop", "é", "--temperature", "50", "--seed", "3", "--max-new-tokens", "60"]
        found = process("ask", "Who?", document, *tiny, *options, env=environment)
        assert found.returncode == 0
        assert found.stdout.isascii()
        assert b"\\u" in found.stdout


@pytest.fixture
def inputs(tmp_path: Path, document: str) -> dict[str, str]:
    """Documents of every bad kind, and a good one."""
    from pypdf import PdfWriter

    paths = {name: tmp_path / name for name in ("empty.txt", "blank.txt", "image.pdf", "binary.dat", "directory")}
    paths["empty.txt"].write_text("")
    paths["blank.txt"].write_text(" \n\t ")
    paths["binary.dat"].write_bytes(bytes(range(256)) * 20)
    paths["directory"].mkdir()
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(paths["image.pdf"])
    return {name: str(path) for name, path in paths.items()} | {"good": document, "missing": str(tmp_path / "no.txt")}


BAD_DOCUMENTS = {
    "missing": ("no.txt", "no such file"),
    "empty.txt": ("empty.txt", "is empty"),
    "blank.txt": ("blank.txt", "is empty"),
    "image.pdf": ("image.pdf", "text"),
    "binary.dat": ("binary.dat", "no readable text"),
    "directory": ("directory", "name the files in it"),
}
BAD_OPTIONS = [
    (["--target", "nonesuch"], "unknown model nonesuch"),
    (["--drafter", "nonesuch"], "unknown model nonesuch"),
    (["--target", "./nonesuch.gguf"], "nonesuch.gguf does not exist"),
    (["--num-draft-tokens", "-1"], "num_draft_tokens must be between 0 and 128, got -1"),
    (["--num-draft-tokens", "nan"], "num-draft-tokens"),
    (["--eta", "-1"], "eta must be finite and at least 0, got -1"),
    (["--eta", "nan"], "eta must be finite and at least 0, got nan"),
    (["--eta", "inf"], "eta must be finite"),
    (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    (["--max-new-tokens", "-1"], "max_new_tokens must be at least 1, got -1"),
    (["--max-new-tokens", "1.5"], "max-new-tokens"),
    (["--max-new-tokens", "5x"], "max-new-tokens"),
    (["--method", "nonsense"], "method must be one of rapid, sd, lookup, lc, rag, sd-full, magicdec, got 'nonsense'"),
    (["--method", "sd", "--eta", "5"], "method sd is eta 0, got eta 5"),
    (["--method", "magicdec", "--eta", "5"], "method magicdec is eta 0, got eta 5"),
    (["--streaming-window", "0"], "streaming_window must be at least 1, got 0"),
    (["--drafter", "self:3bit"], "drafter self:3bit is unknown; use self, self:8bit, self:4bit, or a model"),
    (["--retrieval", "elsewhere"], "source must be one of document, unrelated, oracle, got 'elsewhere'"),
    (["--oracle-span", "5"], "--oracle-span must be [DOCUMENT:]START:END, got '5'"),
    (["--oracle-span", "a:b"], "--oracle-span must be [DOCUMENT:]START:END, got 'a:b'"),
    (["--oracle-span", "0:5"], "source oracle and oracle_spans go together"),
    (["--retrieval", "oracle", "--oracle-span", "5:5"], "end of an oracle span must be at least 6, got 5"),
    (["--retrieval", "unrelated", "--unrelated", "nowhere.txt"], "nowhere.txt"),
    (["--lossless", "--eta", "5"], "--lossless is short for --eta 0, got --eta 5"),
    (["--law", "murphy"], "law must be one of exact, transfer, paper, got 'murphy'"),
    (["--ranking", "fame"], "ranking must be one of"),
    (["--stop", ""], "stop must hold non-empty strings"),
    (["--temperature", "-0.1"], "temperature must be between 0 and 100"),
    (["--top-p", "0"], "top_p must be above 0"),
    (["--seed", "-4"], "seed must be between 0"),
    (["--threads", "0"], "threads"),
    (["--nonsense"], "No such option"),
]


class TestBadInput:
    """Exit 2, nothing on stdout, one line on stderr that names the thing, and no model loaded to find out."""

    @pytest.fixture(autouse=True)
    def no_model(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("a model is loaded before the input is checked")

        monkeypatch.setattr("rapid.engine.Engine.load", refuse)

    @pytest.mark.parametrize("kind", BAD_DOCUMENTS)
    def test_documents(self, run, inputs, kind):
        require_one_line(run("ask", "Who?", inputs["good"], inputs[kind]), *BAD_DOCUMENTS[kind])

    @pytest.mark.parametrize(
        ("options", "message"), BAD_OPTIONS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
    )
    def test_options(self, run, document, options, message):
        require_one_line(run("ask", "Who?", document, *options), message)

    @pytest.mark.parametrize("question", ["", " \n"])
    def test_questions(self, run, document, question):
        require_one_line(run("ask", question, document), "the question is empty")

    def test_a_directory_that_is_no_model(self, run, inputs):
        require_one_line(run("ask", "Who?", inputs["good"], "--target", inputs["directory"]), "no config.json")

    @pytest.mark.parametrize("arguments", [["ask"], ["ask", "Who?"], ["frobnicate"], ["--nonsense"]])
    def test_usage(self, run, arguments):
        require_one_line(run(*arguments), "--help`)")


def require_one_line(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("rapid: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert all(part in err for part in parts), err
    assert "Traceback" not in err


class TestBadInputOfAModel:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_question_longer_than_the_window(self, run, document, tiny, method):
        require_one_line(
            run("ask", "why " * 1000, document, *tiny, "--method", method), "2048 tokens", "shorten the question"
        )

    def test_an_answer_longer_than_the_window(self, run, document, tiny):
        require_one_line(run("ask", "Why?", document, *tiny, "--max-new-tokens", "5000"), "lower max_new_tokens")

    def test_a_drafter_of_another_vocabulary(self, run, document, tiny, make_model_dir):
        other = make_model_dir(seed=1, swapped=(100, 120))
        require_one_line(run("ask", "Why?", document, *tiny, "--drafter", other), "token 100 is")

    def test_a_device_that_is_not_there(self, run, document, tiny):
        require_one_line(run("ask", "Why?", document, *tiny, "--device", "nonsense"), "device 'nonsense'")

    def test_a_threshold_for_words(self, run, document, tiny):
        require_one_line(run("ask", "Why?", document, *tiny, "--threshold", "0.3"), "threshold is a cosine similarity")


class TestTheProcess:
    @pytest.mark.parametrize("kind", ["missing", "image.pdf", "binary.dat"])
    def test_bad_input_is_found_fast(self, inputs, kind):
        before = os.times().children_user
        found = process("ask", "Who?", inputs[kind])
        require_one_line((found.returncode, found.stdout.decode(), found.stderr.decode()), *BAD_DOCUMENTS[kind])
        assert os.times().children_user - before < 1.0

    def test_help_is_fast(self):
        best = min(self.user_seconds("--help") for _ in range(3))
        assert best < 0.5

    @staticmethod
    def user_seconds(*arguments: str) -> float:
        before = os.times().children_user
        assert process(*arguments).returncode == 0
        return os.times().children_user - before

    def test_a_question_that_is_no_utf8(self, document, tiny):
        found = process("ask", b"Who \xff?", document, *tiny)
        assert found.returncode == 0
        assert b"Traceback" not in found.stderr

    @pytest.mark.parametrize("arguments", [["models"], ["ask"], ["ask", "--json"]])
    def test_a_reader_that_went_away_is_no_complaint(self, document, tiny, arguments):
        if arguments[0] == "ask":
            arguments = ["ask", "Who built the mill?", document, *tiny, *arguments[1:]]
        read, write = os.pipe()
        os.close(read)
        try:
            found = subprocess.run([*RAPID, *arguments], stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
        finally:
            os.close(write)
        assert found.stderr == b""
        assert found.returncode == 1

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    @pytest.mark.parametrize("arguments", [["models"], ["ask", "--json"]])
    def test_a_full_disk_is_one_line(self, document, tiny, arguments):
        if arguments[0] == "ask":
            arguments = ["ask", "Who built the mill?", document, *tiny, "--json"]
        with open("/dev/full", "wb") as full:
            found = subprocess.run([*RAPID, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
        assert found.returncode == 1
        assert b"No space left" in found.stderr
        assert found.stderr.count(b"\n") == 1

    def test_an_interrupt_is_one_line(self):
        child = subprocess.Popen(
            [*RAPID, "ask", "Who?", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with child:
            assert child.stdin is not None
            child.stdin.write(b"The beginning of a document.")
            child.stdin.flush()
            time.sleep(2)  # until it waits for the rest
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 130
            assert child.stdout is not None
            assert child.stderr is not None
            assert child.stdout.read() == b""
            assert child.stderr.read() == b"rapid: interrupted\n"

    def test_so_is_one_in_the_middle_of_an_answer(self, run, document, tiny, monkeypatch):
        from rapid.answering import AnswerStream

        pieces = iter(["The", " mill"])

        def interrupted(self):
            for piece in pieces:
                return piece
            raise KeyboardInterrupt

        monkeypatch.setattr(AnswerStream, "_next_piece", interrupted)
        assert run("ask", "Who built the mill?", document, *tiny) == (130, "The mill\n", "rapid: interrupted\n")


class TestOtherCommands:
    def test_no_arguments_is_help(self, run):
        status, out, err = run()
        assert (status, err) == (0, "")
        assert run("--help")[1] == out
        assert "ask" in out
        assert "models" in out

    def test_version(self, run):
        assert run("--version") == (0, f"rapid {rapid.__version__}\n", "")

    def test_models(self, run):
        status, out, err = run("models")
        assert (status, err) == (0, "")
        for words in ("embedded  (SmolLM2-135M-Instruct, language model)", "all-MiniLM-L6-v2", "hub id", "licence"):
            assert words in out

    def test_models_as_json(self, run):
        status, out, err = run("models", "--json")
        assert (status, err) == (0, "")
        models = json.loads(out)
        assert {"embedded"} <= {m["name"] for m in models}
        for model in models:
            assert model.keys() >= {"name", "title", "role", "installed", "path", "size_bytes", "window", "licence"}
            assert model["installed"] or model["install"].startswith("pip install")
