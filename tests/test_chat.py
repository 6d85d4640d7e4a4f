"""`rapid chat`, and the files that `rapid chat` and `rapid ask` keep sessions in."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rapid
from rapid.cli import chat
from rapid.cli import main as command
from rapid.cli.chat import Conversation
from rapid.session import Session

TEXT = "\n\n".join(f"The {place} was built by the guild of {place}s." for place in ("mill", "tower", "bridge", "forge"))
NEW = 12
RAPID = [sys.executable, "-c", "from rapid.cli.main import main; main()"]


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "report.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "report.session"


@pytest.fixture(scope="session")
def tiny(tiny_model_dir: str) -> list[str]:
    return ["--target", tiny_model_dir, "--ranking", "bm25", "--max-new-tokens", str(NEW), "--num-draft-tokens", "3"]


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line in this process, lines on standard input: (exit status, stdout, stderr)."""

    def run(*arguments: str, lines: str | bytes = "") -> tuple[int, str, str]:
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        status = command.run(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def asked(monkeypatch):
    """What sessions are asked: (question, history, query)."""
    calls: list[tuple[str, list[tuple[str, str]], str]] = []
    stream = Session.stream

    def recording(self, question, *, history=(), query=None, **options):
        calls.append((question, list(history), query))
        return stream(self, question, history=history, query=query, **options)

    monkeypatch.setattr(Session, "stream", recording)
    return calls


@pytest.fixture
def restored(monkeypatch):
    """Counts the sessions that were restored."""
    count: list[str] = []
    restore = rapid.Engine.restore

    def counting(self, path, **options):
        session = restore(self, path, **options)
        count.append(str(path))
        return session

    monkeypatch.setattr(rapid.Engine, "restore", counting)
    return count


class TestChat:
    def test_each_line_is_a_question_and_earlier_turns_are_kept(self, run, document, tiny, asked):
        status, out, err = run("chat", document, *tiny, lines="Who built the mill?\n\n  \nAnd the tower?\nWhen?")
        assert status == 0
        answers = out.splitlines()
        assert [len(a) for a in answers] == [NEW] * 3
        assert len(err.splitlines()) == 3
        assert all(line.startswith("[rapid] 12 tokens") for line in err.splitlines())
        turns = [("Who built the mill?", answers[0]), ("And the tower?", answers[1])]
        assert asked == [
            ("Who built the mill?", [], "Who built the mill?"),
            ("And the tower?", turns[:1], "Who built the mill?\nAnd the tower?"),
            ("When?", turns, "And the tower?\nWhen?"),
        ]

    def test_it_answers_as_a_session_with_that_history(self, run, document, tiny, tiny_engine):
        _, out, _ = run("chat", document, *tiny, "--lossless", lines="Who?\nWhen?\n")
        session = tiny_engine.open(document, retrieval=rapid.Retrieval(ranking="bm25"))
        speculation, sampling = rapid.Speculation("lc"), rapid.Sampling(max_new_tokens=NEW)
        first = session.ask("Who?", speculation=speculation, sampling=sampling).text
        second = session.ask("When?", history=[("Who?", first)], speculation=speculation, sampling=sampling).text
        assert out.splitlines() == [first, second]

    def test_its_settings_are_those_of_ask(self, run, document, tiny, monkeypatch, make_model_dir):
        """What `rapid ask` calls by the same name reaches the session, and the drafter its device."""
        given, loaded = [], []
        stream, load = Session.stream, rapid.Engine.load
        monkeypatch.setattr(Session, "stream", lambda self, q, **o: given.append(o) or stream(self, q, **o))
        monkeypatch.setattr(rapid.Engine, "load", lambda *a, **o: loaded.append(o) or load(*a, **o))
        options = [
            *("--lossless", "--min-draft-prob", "0.2", "--streaming-sinks", "2", "--streaming-window", "64"),
            *("--temperature", "0.7", "--top-k", "5", "--min-p", "0.1", "--drafter", make_model_dir(seed=1)),
            *("--drafter-device", "cpu", "--drafter-dtype", "float32"),
            *("--stop", "zz", "--stop", "yy", "--chunk-tokens", "64", "--index", "document"),
        ]
        opened, open_ = [], rapid.Engine.open
        monkeypatch.setattr(rapid.Engine, "open", lambda *a, **o: opened.append(o["retrieval"]) or open_(*a, **o))
        assert run("chat", document, *tiny, *options, lines="Who?")[0] == 0
        speculation, sampling = given[0]["speculation"], given[0]["sampling"]
        assert (speculation.min_draft_prob, speculation.streaming_sinks, speculation.streaming_window) == (0.2, 2, 64)
        assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.stop) == (0.7, 5, 0.1, ("zz", "yy"))
        assert (opened[0].chunk_tokens, opened[0].index) == (64, "document")
        assert (loaded[0]["drafter_device"], loaded[0]["drafter_dtype"]) == ("cpu", "float32")
        assert "ranking bm25 has none" in run("chat", document, *tiny, "--threshold", "0.25")[2]
        assert len(loaded) == 1  # refused before anything is loaded

    def test_no_questions_no_answers(self, run, document, tiny):
        assert run("chat", document, *tiny) == (0, "", "")

    def test_the_oldest_turns_are_dropped_and_it_says_so(self, run, document, tiny, asked, make_model_dir):
        tiny = [*tiny[2:], "--target", make_model_dir(window=640)]
        questions = [f"Question {n} about the mill, {'please ' * 8}?" for n in range(6)]
        status, out, err = run("chat", document, *tiny, lines="\n".join(questions))
        assert status == 0
        assert len(out.splitlines()) == len(questions)
        notes = [line for line in err.splitlines() if "note" in line]
        assert notes
        assert all("oldest" in note and "forgotten" in note for note in notes)
        last_question, history, _ = asked[-1]
        assert last_question == questions[-1].strip()
        assert 0 < len(history) < 5
        assert [q for q, _ in history] == questions[5 - len(history) : 5]  # the latest stay

    def test_a_question_that_fails_does_not_end_the_conversation(self, run, document, tiny):
        status, out, err = run("chat", document, *tiny, lines=f"Who?\n{'very ' * 600}long?\nWhen?\n")
        assert status == 2
        assert len(out.splitlines()) == 2
        (failure,) = [line for line in err.splitlines() if line.startswith("rapid: ") and "note:" not in line]
        assert "exceed" in failure

    def test_lines_that_are_no_utf8(self, run, document, tiny):
        status, out, _ = run("chat", document, *tiny, lines=b"Who \xff\xfe?\n")
        assert (status, len(out.splitlines())) == (0, 1)

    def test_a_note_on_the_document_is_given_once(self, run, tmp_path, tiny):
        long = tmp_path / "long.txt"
        long.write_text(TEXT * 20)
        status, _, err = run("chat", str(long), *tiny, lines="Who?\nWhen?\n")
        assert status == 0
        assert err.count("left out") == 1

    @pytest.mark.parametrize("arguments", [["chat"], ["chat", "-"], ["chat", "missing.txt"], ["chat", "--json"]])
    def test_bad_usage_is_one_line(self, run, arguments):
        status, out, err = run(*arguments, lines="Who?\n")
        assert (status, out) == (2, "")
        assert err.startswith("rapid: ")
        assert err.count("\n") == 1

    def test_on_a_terminal_the_end_of_the_input_and_an_interrupt_end_it(self, monkeypatch, capsys):
        for end in (EOFError, KeyboardInterrupt):
            typed = iter(["Who?", "", " When? "])

            def prompt(sign, typed=typed, end=end):
                for line in typed:
                    return line
                raise end

            monkeypatch.setattr("builtins.input", prompt)
            monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
            assert list(chat._questions()) == ["Who?", "When?"]
            assert capsys.readouterr().out == "\n"

    @pytest.mark.parametrize("terminal", [True, False])
    def test_an_interrupt_within_an_answer(self, monkeypatch, terminal):
        def interrupted(self, question):
            raise KeyboardInterrupt

        monkeypatch.setattr(Conversation, "answer", interrupted)
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"isatty": lambda self: terminal})())
        conversation = Conversation(None, rapid.Speculation(), rapid.Sampling())  # type: ignore[arg-type]
        if terminal:  # the answer ends, not the conversation
            assert chat._answer(conversation, "Who?") == 0
        else:
            with pytest.raises(KeyboardInterrupt):
                chat._answer(conversation, "Who?")

    def test_an_unfinished_turn_is_not_remembered(self, tiny_engine, document, monkeypatch):
        from rapid.answering import AnswerStream

        session = tiny_engine.open(document, retrieval=rapid.Retrieval(ranking="bm25"))
        conversation = Conversation(session, rapid.Speculation(num_draft_tokens=3), rapid.Sampling(max_new_tokens=NEW))
        with monkeypatch.context() as patch:
            patch.setattr(AnswerStream, "_next_piece", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                conversation.answer("Who?")
        assert conversation.history == []
        conversation.answer("When?")
        assert [q for q, _ in conversation.history] == ["When?"]

    @pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
    def test_on_a_real_terminal(self, document, tiny):
        import pty

        main, terminal = pty.openpty()
        with subprocess.Popen(
            [*RAPID, "chat", document, *tiny], stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            os.close(terminal)
            os.write(main, b"Who built the mill?\n\x04")
            out, err = child.communicate(timeout=120)
        os.close(main)
        assert child.returncode == 0
        assert b"Traceback" not in err
        assert len(out.decode().replace("> ", "").strip()) <= NEW
        assert b"12 tokens" in err


class TestSessionFiles:
    def ask(self, run, *arguments):
        status, out, err = run("ask", "Who built the forge?", *arguments, "--json", "--lossless")
        return status, json.loads(out)["answer"] if out else out, err

    def test_ask_saves_and_then_restores(self, run, document, tiny, file, restored):
        first = self.ask(run, document, *tiny, "--session", str(file))
        assert first[0] == 0
        assert restored == []
        assert file.exists()
        plain = self.ask(run, document, *tiny)
        content = file.read_bytes()
        for arguments in ([document], []):
            assert self.ask(run, *arguments, *tiny, "--session", str(file)) == plain == first
        assert len(restored) == 2
        assert file.read_bytes() == content

    def test_chat_uses_the_same_files(self, run, document, tiny, file, restored):
        assert run("chat", document, *tiny, "--session", str(file), lines="Who?\n")[0] == 0
        os.remove(document)
        status, out, _ = run("chat", *tiny, "--session", str(file), lines="Who?\nWhen?\n")
        assert (status, len(out.splitlines())) == (0, 2)
        assert self.ask(run, *tiny, "--session", str(file))[0] == 0
        assert len(restored) == 2

    def test_a_document_that_changed_is_read_again(self, run, document, tiny, file, restored):
        self.ask(run, document, *tiny, "--session", str(file))
        Path(document).write_text(TEXT.replace("mill", "inn"))
        status, answer, err = self.ask(run, document, *tiny, "--session", str(file))
        assert (status, answer) == self.ask(run, document, *tiny)[:2]
        (note,) = err.splitlines()
        assert note.startswith("rapid: note: session ")
        assert "other documents" in note
        assert restored == []
        assert self.ask(run, document, *tiny, "--session", str(file)) == (0, answer, "")
        assert restored

    @pytest.mark.parametrize("reason", ["damaged", "another model", "dtype"])
    def test_without_documents_what_does_not_fit_is_refused(self, run, document, tiny, file, reason, make_model_dir):
        self.ask(run, document, *tiny, "--session", str(file))
        options = [*tiny]
        if reason == "damaged":
            content = bytearray(file.read_bytes())
            content[-100] ^= 1
            file.write_bytes(content)
        elif reason == "dtype":
            options += ["--dtype", "bfloat16"]
        else:
            options += ["--target", make_model_dir(seed=1)]
        before = file.read_bytes()
        status, out, err = self.ask(run, *options, "--session", str(file))
        assert (status, out) == (2, "")
        assert err.startswith("rapid: session ")
        assert reason in err
        assert err.count("\n") == 1
        assert file.read_bytes() == before
        # With them, they are read again, and the file is made anew.
        status, _, err = self.ask(run, document, *options, "--session", str(file))
        assert status == 0
        assert reason in err
        assert self.ask(run, *options, "--session", str(file))[::2] == (0, "")

    def test_somebody_elses_file_is_left_alone(self, run, document, tiny, tmp_path):
        other = tmp_path / "notes.txt"
        other.write_text("My notes.")
        for arguments in ([document], []):
            status, out, err = self.ask(run, *arguments, *tiny, "--session", str(other))
            assert (status, out) == (2, "")
            assert "no saved session" in err
            assert err.count("\n") == 1
        assert other.read_text() == "My notes."

    @pytest.mark.parametrize("place", ["", "missing/file"])
    def test_a_place_where_nothing_can_be_saved_is_refused_before_models_are_loaded(
        self, run, document, tiny, tmp_path, place, monkeypatch
    ):
        monkeypatch.setattr(rapid.Engine, "load", None)
        status, out, err = self.ask(run, document, *tiny, "--session", str(tmp_path / place))
        assert (status, out) == (2, "")
        assert "cannot be saved" in err

    def test_neither_a_document_nor_a_session(self, run, tiny, file):
        status, out, err = self.ask(run, *tiny, "--session", str(file))
        assert (status, out) == (2, "")
        assert "no document given" in err

    def test_settings_of_retrieval_are_the_saved_ones_unless_given(self, run, document, tiny, file, monkeypatch):
        self.ask(run, document, *tiny, "--chunk-tokens", "64", "--session", str(file))
        plain = [option for option in tiny if option not in ("--ranking", "bm25")]
        found = {}
        for name, options in {"saved": plain, "given": [*tiny, "--chunk-tokens", "32"]}.items():
            _, out, _ = run("ask", "Who built the forge?", *options, "--session", str(file), "--json")
            found[name] = json.loads(out)["settings"]["retrieval"]
        assert (found["saved"]["ranking"], found["saved"]["chunk_tokens"]) == ("bm25", 64)
        assert (found["given"]["ranking"], found["given"]["chunk_tokens"]) == ("bm25", 32)
