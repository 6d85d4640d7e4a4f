"""Saved sessions, the memory budget of several, and the room their caches take.

The tokenizer has one token per byte, so that for ASCII text tokens can be counted as characters.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import rapid
from rapid import sealed, store
from rapid.backends.base import CacheState
from rapid.backends.reader import LocalReader
from rapid.engine import Engine
from rapid.errors import InvalidParameter, ModelError, RapidError, SessionError
from rapid.models.cache import HEADROOM, GrowingLayer
from rapid.models.hf import HFModel
from rapid.models.toy import Script, tiny
from rapid.params import METHODS
from rapid.prompt import Template
from rapid.session import Session

BM25 = rapid.Retrieval(ranking="bm25", chunk_tokens=64)
PLACES = ["harbour", "mill", "tower", "bridge", "quarry", "orchard", "chapel", "forge", "tannery", "brewery"]
REPORT = "\n\n".join(f"The {place} was built in {1700 + i} by the {place}'s guild." for i, place in enumerate(PLACES))
DOCUMENT = rapid.Document(REPORT, "report.txt")
QUESTION = "Who built the quarry?"


def opened(engine: Engine, document: rapid.Document = DOCUMENT, **options) -> Session:
    return engine.open(document, retrieval=BM25, reserve_tokens=options.pop("reserve_tokens", 400), **options)


def ask(session: Session, method: str = "sd", question: str = QUESTION, new: int = 16) -> rapid.Answer:
    return session.ask(
        question,
        speculation=rapid.Speculation(method, num_draft_tokens=4),
        sampling=rapid.Sampling(max_new_tokens=new),
    )


@pytest.fixture
def fed(monkeypatch):
    """Tokens of every forward pass from here on."""
    sizes: list[int] = []
    run = HFModel.run

    def counting(self, token_ids, *args, **kwargs):
        sizes.append(len(token_ids))
        return run(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(HFModel, "run", counting)
    return sizes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "report.session"


@pytest.fixture
def saved(tiny_engine: Engine, file: Path) -> Path:
    opened(tiny_engine).save(file)
    return file


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


class TestRoundTrip:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_restored_session_answers_as_the_saved_one(self, tiny_engine, saved, method):
        restored = tiny_engine.restore(saved)
        for question in (QUESTION, "When was the forge built?"):
            expected = ask(opened(tiny_engine), method, question)
            answer = ask(restored, method, question)
            assert answer.token_ids == expected.token_ids
            assert answer.retrieved == expected.retrieved
        assert restored.documents == [DOCUMENT]
        assert restored.retrieval == BM25

    def test_the_document_is_not_read_again(self, tiny_engine, saved, fed):
        restored = tiny_engine.restore(saved)
        answer = ask(restored, "lc")
        # One token to learn the cache's shape, the words around the question, the question, a pass a token.
        assert sum(fed) < len(QUESTION) + 80 + 1 + len(answer.token_ids) < len(REPORT)
        assert 0 < answer.stats.prefill_s < answer.stats.ttft_s

    def test_the_file_is_plain_safetensors_of_the_used_length(self, tiny_engine, saved):
        session = opened(tiny_engine)
        with safe_open(saved, framework="pt") as handle:
            header = json.loads(handle.metadata()["rapid_session"])
            ids = handle.get_tensor("token_ids").tolist()
            keys = handle.get_tensor("layers.1.keys")
            text = bytes(handle.get_tensor("documents.0").tolist()).decode()
        assert header["format"] == store.FORMAT
        assert header["rapid"] == rapid.__version__
        assert header["dtype"] == "float32"
        assert [d["name"] for d in header["documents"]] == ["report.txt"]
        assert text == REPORT
        assert len(REPORT) < len(ids) < len(REPORT) + 120
        assert keys.shape == (1, 2, len(ids), 8)
        assert torch.equal(keys, session._reader._document.export(len(ids))["layers.1.keys"])
        assert saved.stat().st_size < 2 * 2 * keys.nbytes + 8 * len(ids) + len(REPORT) + 4096
        assert saved.stat().st_mode & 0o077 == 0  # it holds the documents

    def test_saving_writes_what_all_questions_share_and_disturbs_no_answer(self, tiny_engine, file, saved):
        session = opened(tiny_engine)
        whole = ask(session, "lc")
        stream = session.stream(
            QUESTION, speculation=rapid.Speculation("lc"), sampling=rapid.Sampling(max_new_tokens=16)
        )
        next(iter(stream))
        other = file.with_name("other")
        session.save(other)
        assert stream.finish().token_ids == whole.token_ids
        assert other.read_bytes() == saved.read_bytes()

    def test_a_document_not_read_yet_is_read_to_be_saved(self, tiny_engine, file, saved):
        session = opened(tiny_engine, prefill=False)
        ask(session, "rag")
        session.save(file.with_name("other"))
        assert file.with_name("other").read_bytes() == saved.read_bytes()

    def test_a_document_cut_to_the_window_comes_back_cut_the_same_way(self, tiny_engine, file):
        long = rapid.Document("\n\n".join(REPORT.replace("The", f"Of {n}: the") for n in range(9)))
        session = opened(tiny_engine, long)
        assert "left out" in session.warnings[0]
        session.save(file)
        restored = tiny_engine.restore(file)
        assert restored.warnings == session.warnings
        assert restored.context == session.context
        assert ask(restored).token_ids == ask(session).token_ids

    def test_the_template_and_several_documents_come_back(self, tiny_engine, file):
        documents = [DOCUMENT, rapid.Document("The wörd \U0001f600 is “öffentlich”.", "zweites.txt")]
        template = Template(system="Be brief.", closing="\nAnswer in one word.")
        session = tiny_engine.open(documents, retrieval=BM25, template=template)
        session.save(file)
        restored = tiny_engine.restore(str(file), documents=documents)
        assert restored.template == template
        assert restored.documents == documents
        assert ask(restored).token_ids == ask(session).token_ids

    def test_float16_halves_the_file(self, tiny_engine, saved, file):
        half = file.with_name("half")
        opened(tiny_engine).save(half, dtype="float16")
        assert half.stat().st_size < 0.62 * saved.stat().st_size  # token ids and texts stay
        restored = tiny_engine.restore(half)
        assert restored._reader._document.cache.growing[0].keys.dtype == torch.float32
        exact, rounded = (tiny_engine.restore(path)._reader._document.cache.read(500)[1][0] for path in (saved, half))
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close(rounded, exact, rtol=1e-3, atol=1e-3)
        with pytest.raises(InvalidParameter, match="dtype of a saved session"):
            opened(tiny_engine).save(half, dtype="int8")

    @pytest.mark.embedded
    @pytest.mark.parametrize("dtype", [None, "float16"])
    def test_the_embedded_model_gives_the_same_answer(self, embedded_engine, file, dtype):
        session = embedded_engine.open(DOCUMENT, retrieval=BM25)
        session.save(file, dtype=dtype)
        answers = [ask(s, "lc", new=24) for s in (session, embedded_engine.restore(file))]
        assert answers[0].token_ids == answers[1].token_ids


class TestRefusals:
    def test_another_model(self, saved, make_model_dir):
        other = Engine.load(make_model_dir(seed=1))
        with pytest.raises(SessionError) as error:
            other.restore(saved)
        assert "another model" in one_line(error)

    def test_the_same_model_loaded_again_is_no_other(self, saved, tiny_model_dir, tiny_engine):
        again = Engine.load(tiny_model_dir)
        assert ask(again.restore(saved)).token_ids == ask(opened(tiny_engine)).token_ids

    def test_a_single_weight_tensor_makes_another_model(self):
        model, changed = tiny(0), tiny(0)
        assert model.fingerprint == changed.fingerprint
        changed = tiny(0)
        changed.model.model.layers[1].mlp.up_proj.weight.data.mul_(1.001)
        assert model.fingerprint != changed.fingerprint

    def test_another_setting_of_the_config_makes_another_model(self):
        changed = tiny(0)
        changed.model.config.rms_norm_eps = 1e-3
        assert tiny(0).fingerprint != changed.fingerprint

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32-packed"])
    def test_another_dtype(self, saved, tiny_model_dir, dtype):
        other = Engine.load(tiny_model_dir, dtype=dtype)
        with pytest.raises(SessionError) as error:
            other.restore(saved)
        assert "dtype float32" in one_line(error)
        assert f"is loaded with {dtype};" in one_line(error)

    def test_bfloat16_round_trip(self, file, tiny_model_dir):
        engine = Engine.load(tiny_model_dir, dtype="bfloat16")
        session = opened(engine)
        session.save(file)
        assert ask(engine.restore(file), "lc").token_ids == ask(session, "lc").token_ids

    def test_other_documents(self, tiny_engine, saved):
        assert tiny_engine.restore(saved, documents=rapid.Document(REPORT, "renamed.txt"))
        for text in (REPORT.replace("1700", "1701"), REPORT + "\n"):
            with pytest.raises(SessionError) as error:
                tiny_engine.restore(saved, documents=rapid.Document(text, "report.txt"))
            assert "other documents" in one_line(error)
        with pytest.raises(SessionError, match="other documents"):
            tiny_engine.restore(saved, documents=[DOCUMENT, DOCUMENT])

    def test_another_format(self, tiny_engine, saved, monkeypatch):
        monkeypatch.setattr(store, "FORMAT", 99)
        with pytest.raises(SessionError) as error:
            tiny_engine.restore(saved)
        assert "has format 1 (rapid " in one_line(error)
        assert "reads format 99" in one_line(error)

    def test_any_damaged_byte(self, tiny_engine, saved):
        """The first and last ones, all of a header's region by steps, and a sample of the rest."""
        whole = saved.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        places = [*range(8), *range(8, header, 23), *range(header, len(whole), len(whole) // 60), *range(-5, 0)]
        for place in places:
            broken = bytearray(whole)
            broken[place] ^= 0x01
            saved.write_bytes(broken)
            with pytest.raises(SessionError) as error:
                tiny_engine.restore(saved)
            assert str(saved) in one_line(error)
        saved.write_bytes(whole)
        assert tiny_engine.restore(saved)  # the control

    @pytest.mark.parametrize("change", ["cut", "cut to nothing", "longer", "text", "headless", "zeros"])
    def test_what_is_no_whole_file(self, tiny_engine, saved, change):
        whole = saved.read_bytes()
        content = {
            "cut": whole[:-1000],
            "cut to nothing": b"",
            "longer": whole + b"\0",
            "text": REPORT.encode(),
            "headless": whole[:100],
            "zeros": whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2),
        }
        saved.write_bytes(content[change])
        with pytest.raises(SessionError, match="damaged or no saved session"):
            tiny_engine.restore(saved)

    def test_what_is_no_file(self, tiny_engine, tmp_path):
        with pytest.raises(SessionError, match="does not exist"):
            tiny_engine.restore(tmp_path / "missing")
        with pytest.raises(SessionError, match="is no file"):
            tiny_engine.restore(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(SessionError, match="is no file"):
            tiny_engine.restore(tmp_path / "pipe")

    def forged(self, saved: Path, header=None, **tensors) -> None:
        """The file with some of its content replaced (None: removed), and a checksum that is right."""
        with sealed.reading(saved) as file:
            old, content = file.header, {name: tensor.clone() for name, tensor in file.tensors.items()}
        content = {name: t for name, t in {**content, **tensors}.items() if t is not None}
        sealed.write(saved, {**old, **(header or {})}, content)

    @pytest.mark.parametrize(
        "header",
        [
            {"documents": None},
            {"documents": [{"name": "report.txt", "sha256": "0"}]},
            {"documents": [{"name": 7}]},
            {"retrieval": {"ranking": "none"}},
            {"retrieval": {"unknown": 1}},
            {"template": {"opening": 3}},
            {"template": []},
            {"reserve_tokens": "many"},
            {"model": None},
        ],
        ids=str,
    )
    def test_a_forged_header(self, tiny_engine, saved, header):
        self.forged(saved, header)
        with pytest.raises(SessionError) as error:
            tiny_engine.restore(saved)
        one_line(error)

    @pytest.mark.parametrize("change", ["missing", "short", "heads", "integers", "vector"])
    def test_forged_tensors(self, tiny_engine, saved, change):
        with sealed.reading(saved) as file:
            keys = file.tensors["layers.1.keys"].clone()
        self.forged(
            saved,
            **{
                "layers.1.keys": {
                    "missing": None,
                    "short": keys[:, :, :-1].contiguous(),
                    "heads": keys[:, :1].contiguous(),
                    "integers": keys.long(),
                    "vector": keys.reshape(-1),
                }[change]
            },
        )
        with pytest.raises(ModelError) as error:
            tiny_engine.restore(saved)
        assert "layers.1.keys" in one_line(error)

    @pytest.mark.parametrize(
        "ids", [[], [-1] * 50, [10**9] * 50, list(range(50)), [1] * 5000], ids=["none", "-", "+", "other", "long"]
    )
    def test_forged_token_ids(self, tiny_engine, saved, ids):
        self.forged(saved, token_ids=torch.tensor(ids, dtype=torch.int64))
        with pytest.raises(RapidError) as error:
            tiny_engine.restore(saved)
        one_line(error)

    def test_a_model_whose_cache_is_not_ours_to_save(self):
        script = Script([1, 2, 3], vocab_size=4, eos_token_ids=[0])
        reader = LocalReader(script, script, None)
        reader.prefill([1, 2])
        with pytest.raises(ModelError, match="cannot be saved"):
            reader.export(2)


class TestWriting:
    def test_where_nothing_is_written(self, tiny_engine, tmp_path, saved):
        session = opened(tiny_engine)
        report = tmp_path / "report.txt"
        report.write_text(REPORT)
        link = tmp_path / "link"
        link.symlink_to(saved)
        os.mkfifo(tmp_path / "pipe")
        for path, reason in {
            tmp_path: "is a directory",
            report: "is no saved session",
            link: "symbolic link",
            tmp_path / "pipe": "no regular file",
            tmp_path / "missing" / "file": "no directory",
            report / "file": "Not a directory",
            Path(""): "is a directory",
            Path("a\0b"): "null byte",
        }.items():
            with pytest.raises(SessionError, match=reason) as error:
                session.save(path)
            one_line(error)
        assert report.read_text() == REPORT
        assert link.is_symlink()

    def test_older_sessions_and_empty_files_are_replaced(self, tiny_engine, file, saved):
        before = file.stat().st_ino
        opened(tiny_engine, rapid.Document("Another one.")).save(file)
        assert file.stat().st_ino != before
        empty = file.with_name("empty")
        empty.touch()
        opened(tiny_engine).save(empty)
        assert tiny_engine.restore(empty).documents == [DOCUMENT]

    @pytest.mark.parametrize("where", ["write", "fsync", "replace"])
    def test_a_full_disk_leaves_the_old_file_and_nothing_else(self, tiny_engine, saved, monkeypatch, where):
        whole = saved.read_bytes()
        session = opened(tiny_engine, rapid.Document(REPORT + " More."))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if where == "write":  # a real limit of this process on the size of files
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        else:
            monkeypatch.setattr(os, where, lambda *_: (_ for _ in ()).throw(full))
        try:
            with pytest.raises(SessionError) as error:
                session.save(saved)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert ("File too large" if where == "write" else "No space left on device") in one_line(error)
        assert "MiB are needed" in one_line(error)
        assert os.listdir(saved.parent) == [saved.name]
        assert saved.read_bytes() == whole

    WRITER = (
        "import sys, torch; from pathlib import Path; from rapid import sealed\n"
        "path, fill = Path(sys.argv[1]), float(sys.argv[2])\n"
        "tensors = {str(i): torch.full((2**18,), fill) for i in range(8)}\n"
        "print('ready', flush=True)\n"
        "while True: sealed.write(path, {'fill': fill}, tensors)\n"
    )

    def writer(self, path: Path, fill: float) -> subprocess.Popen:
        child = subprocess.Popen([sys.executable, "-c", self.WRITER, path, str(fill)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child

    @staticmethod
    def read(path: Path) -> float:
        """The one value all of the file is filled with."""
        with sealed.reading(path) as file:
            file.verify()
            values = {float(v) for tensor in file.tensors.values() for v in tensor.unique()}
        assert values == {file.header["fill"]}
        return values.pop()

    def test_kill_9_leaves_a_whole_file(self, file):
        sealed.write(file, {"fill": 0.0}, {"0": torch.zeros(2**18)})
        with self.writer(file, 1.0) as child:
            while True:  # until it is caught in the middle of writing
                child.send_signal(signal.SIGSTOP)
                time.sleep(0.01)  # until it stands still
                if left := list(file.parent.glob(".*.tmp")):
                    break
                child.send_signal(signal.SIGCONT)
            child.send_signal(signal.SIGKILL)
        assert self.read(file) in (0.0, 1.0)
        (abandoned,) = left
        assert abandoned.exists()
        sealed.write(file, {"fill": 2.0}, {"0": torch.full((4,), 2.0)})
        assert abandoned.exists()  # its writer could still be at work
        os.utime(abandoned, (0, 0))
        sealed.write(file, {"fill": 3.0}, {"0": torch.full((4,), 3.0)})
        assert os.listdir(file.parent) == [file.name]
        assert self.read(file) == 3.0

    def test_two_processes_on_one_file(self, file):
        with self.writer(file, 1.0) as one, self.writer(file, 2.0) as two:
            seen: set[float] = set()
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and seen != {1.0, 2.0}:
                seen.add(self.read(file))
            for child in (one, two):
                child.kill()
        assert seen == {1.0, 2.0}


class TestBudget:
    DOCUMENTS = tuple(rapid.Document(f"Volume {n}. {REPORT}", f"{n}.txt") for n in range(3))

    def test_three_sessions_in_the_memory_of_one(self, tiny_engine, tmp_path, monkeypatch, fed):
        monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path))
        parked = tmp_path / "sessions"
        expected = [ask(opened(tiny_engine, d)).token_ids for d in self.DOCUMENTS]
        one = max(opened(tiny_engine, d)._reader.num_bytes for d in self.DOCUMENTS)
        engine = Engine(tiny_engine.backend, max_session_bytes=one)
        sessions = [opened(engine, d) for d in self.DOCUMENTS]
        for number in (0, 1, 2, 2, 0, 1, 0):
            fed.clear()
            assert ask(sessions[number]).token_ids == expected[number]
            assert max(fed) < len(REPORT) - 100, "the document was read again"
            in_memory = [i for i, s in enumerate(sessions) if s._reader.num_bytes]
            assert in_memory == [number]
            assert len(list(parked.iterdir())) == 2
        del sessions
        assert list(parked.iterdir()) == []

    def test_what_the_disk_cannot_take_is_read_again(self, tiny_engine, tmp_path, monkeypatch, fed):
        (tmp_path / "file").touch()
        monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path / "file"))
        engine = Engine(tiny_engine.backend, max_session_bytes=0)
        first, second = (opened(engine, d) for d in self.DOCUMENTS[:2])
        assert first._reader.num_bytes == 0
        fed.clear()
        assert ask(first).token_ids == ask(opened(tiny_engine, self.DOCUMENTS[0])).token_ids
        assert sum(fed) > len(REPORT)
        assert second._reader.num_bytes == 0

    def test_so_is_what_was_damaged_on_disk(self, tiny_engine, tmp_path, monkeypatch):
        monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path))
        engine = Engine(tiny_engine.backend, max_session_bytes=0)
        first, _ = (opened(engine, d) for d in self.DOCUMENTS[:2])
        (path,) = (tmp_path / "sessions").iterdir()
        path.write_bytes(path.read_bytes()[:-3000] + bytes(3000))
        assert ask(first).token_ids == ask(opened(tiny_engine, self.DOCUMENTS[0])).token_ids

    def test_an_answer_under_way_keeps_its_cache(self, tiny_engine, tmp_path, monkeypatch):
        monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path))
        engine = Engine(tiny_engine.backend, max_session_bytes=0)
        first, second = (opened(engine, d) for d in self.DOCUMENTS[:2])
        expected = ask(first).token_ids
        stream = first.stream(
            QUESTION,
            speculation=rapid.Speculation("sd", num_draft_tokens=4),
            sampling=rapid.Sampling(max_new_tokens=16),
        )
        next(iter(stream))
        ask(second)
        assert first._reader.num_bytes > 0
        assert stream.finish().token_ids == expected
        ask(second)
        assert first._reader.num_bytes == 0

    def test_what_a_killed_process_parked_is_removed(self, tiny_engine, tmp_path, monkeypatch):
        monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path))
        (tmp_path / "sessions").mkdir()
        dead = subprocess.Popen(["true"])
        dead.wait()
        left = [tmp_path / "sessions" / f"{pid}-abc.parked" for pid in (dead.pid, os.getpid(), os.getppid())]
        for path in left:
            path.touch()
        engine = Engine(tiny_engine.backend, max_session_bytes=0)
        sessions = [opened(engine, d) for d in self.DOCUMENTS[:2]]
        assert [path.exists() for path in left] == [False, True, True]
        assert sessions

    def test_without_a_budget_all_stay(self, tiny_engine):
        sessions = [opened(tiny_engine, d) for d in self.DOCUMENTS]
        assert all(s._reader.num_bytes for s in sessions)

    @pytest.mark.parametrize("wrong", [-1, 1.5, "1G", True])
    def test_an_impossible_budget_is_refused(self, tiny_engine, wrong):
        with pytest.raises(InvalidParameter, match="max_session_bytes"):
            Engine(tiny_engine.backend, max_session_bytes=wrong)


class TestReuseAndRoom:
    def test_the_drafter_reads_repeated_passages_once(self, tiny_engine, fed):
        session = opened(tiny_engine)
        first = ask(session, "sd", question="Who built the mill?")
        fed.clear()
        second = ask(session, "sd", question="Was it built by the mill?")
        assert second.retrieved[0].chunk == first.retrieved[0].chunk
        both = second.prompt_tokens + second.draft_prompt_tokens
        # Per round at most four drafted tokens, five verified and one fed again; before them two questions.
        assert sum(fed) < 2 * 130 + 10 * second.stats.rounds < both
        fed.clear()
        again = ask(session, "sd", question="Was it built by the mill?")
        assert max(fed) <= 5  # nothing of either prompt but its last token
        assert again.token_ids == second.token_ids

    def test_decoding_behind_a_prefill_moves_no_memory(self):
        sequence = tiny(0).new_sequence()
        sequence.prefill([1] * 700)
        layers = sequence.cache.growing
        before = [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.capacity) for layer in layers]
        assert before[0][2] == 700 + HEADROOM
        for _ in range(8):
            sequence.forward([2] * 64)
        assert [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.capacity) for layer in layers] == before

    def test_memory_is_flat_over_2000_tokens(self, make_model_dir):
        engine = Engine.load(make_model_dir(window=4096))
        session = opened(engine, reserve_tokens=2400)
        sampling = rapid.Sampling(max_new_tokens=2000)
        stream = session.stream(QUESTION, speculation=rapid.Speculation("sd", num_draft_tokens=1), sampling=sampling)
        reader = session._reader
        layers = [*reader._document.cache.growing, *reader._drafting.cache.growing]
        next(iter(stream))
        before = [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.capacity) for layer in layers]
        num_bytes = reader.num_bytes
        for _ in stream:
            assert reader.num_bytes == num_bytes
        assert len(stream.finish().token_ids) == 2000
        assert [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.capacity) for layer in layers] == before

    def test_growth_goes_layer_by_layer(self, monkeypatch):
        """At no time is there more than the new cache and one old tensor."""
        sequence = tiny(0).new_sequence()
        sequence.prefill([1] * 700)
        cache = sequence.cache
        one = cache.growing[0].keys.nbytes
        alive: list[int] = []
        resized = GrowingLayer._resized

        def watched(self, buffer, capacity):
            new = resized(self, buffer, capacity)
            alive.append(cache.num_bytes + new.nbytes)
            return new

        monkeypatch.setattr(GrowingLayer, "_resized", watched)
        cache.reserve(3000)
        assert len(alive) == 2 * len(cache.growing)
        assert max(alive) <= cache.num_bytes + one

    def test_restoring_takes_state_of_this_shape_only(self):
        sequence = tiny(0).new_sequence()
        sequence.prefill([1, 2, 3])
        state = CacheState([1, 2, 3], sequence.export(3))
        other = tiny(0, heads=4, kv_heads=1).new_sequence()
        with pytest.raises(ModelError, match="does not fit"):
            other.restore(state.token_ids, state.tensors)
        assert other.length == 0
