"""The benchmarks: what a report holds, that its comparisons are of equals, and that they notice when they are not."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rapid.bench import setup
from rapid.bench.decode import DecodeSettings, bench_decode
from rapid.bench.ends import without_ends
from rapid.bench.methods import METHODS, OUR_METHODS
from rapid.bench.prompts import choose, load_items
from rapid.bench.summary import summarise
from rapid.cli import main as command
from rapid.engine import Engine
from rapid.errors import InvalidParameter
from rapid.models.cache import GrowingCache
from rapid.params import Models, Retrieval, Speculation

ROW = (
    *("method", "context", "prompt", "repeat", "decode_tokens_per_s", "prefill_s", "ttft_s", "acceptance_rate"),
    *("mean_acceptance_length", "draft_s", "verify_s", "other_s", "peak_rss_bytes", "equal_to_plain"),
)
SUMMARY = ("method", "context", "median_tokens_per_s", "ratio_to_lc", "ratio_to_hf_plain", "min_ratio_to_lc")
CONDITIONS = (
    *("model", "contexts", "hardware", "cores", "threads", "dtype", "packing", "seed", "versions", "malloc", "date"),
    "command",
)
PLACES = ("mill", "tower", "bridge", "forge", "well", "barn", "chapel", "quay")


@pytest.fixture(autouse=True)
def _leave_the_allocator_of_the_tests_alone(monkeypatch):
    monkeypatch.setattr(setup, "raise_malloc_thresholds", lambda: {"mmap_threshold": None, "trim_threshold": None})


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> str:
    """Four questions on documents of 450 to 1,000 bytes (the tiny model's tokens are bytes)."""
    path = tmp_path_factory.mktemp("task") / "places.jsonl"
    items = []
    for number, place in enumerate(PLACES[:4]):
        sentences = [f"The {place} of the {p} was built in {1500 + 7 * i + number}." for i, p in enumerate(PLACES)]
        items.append(
            {
                "id": place,
                "context": " ".join(sentences * (number + 1))[: 450 + 180 * number],
                "question": f"When was the {place} built?",
                "answers": ["1500"],
                "metric": ("qa_f1", "string_match_part")[number % 2],
            }
        )
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


@pytest.fixture(scope="module")
def settings(task, tiny_model_dir) -> DecodeSettings:
    return DecodeSettings(
        models=Models(tiny_model_dir),
        contexts=(600,),
        tasks=(task,),
        prompts=2,
        repeats=2,
        max_new_tokens=16,
        num_draft_tokens=4,
        retrieval=Retrieval("bm25", context_budget=200),
    )


@pytest.fixture(scope="module")
def report(settings):
    """Every method, two prompts, two repeats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "raise_malloc_thresholds", lambda: {"mmap_threshold": 1, "trim_threshold": 2})
        return bench_decode(settings, lambda line: None)


class TestDecode:
    def test_the_schema(self, report):
        json.dumps(report, allow_nan=False)
        assert set(CONDITIONS) <= report["conditions"].keys()
        assert report["conditions"]["versions"].keys() == {"python", "torch", "transformers", "rapid"}
        assert report["conditions"]["malloc"] == {"mmap_threshold": 1, "trim_threshold": 2}
        for row in report["rows"]:
            assert tuple(row)[: len(ROW)] == ROW
        for entry in report["summary"]:
            assert tuple(entry)[: len(SUMMARY)] == SUMMARY

    def test_every_method_answers_every_prompt_in_every_repeat_in_turning_order(self, report):
        rows = report["rows"]
        assert len({(r["method"], r["prompt"], r["repeat"]) for r in rows}) == len(rows) == len(METHODS) * 2 * 2
        firsts = [rows[i * len(METHODS)]["method"] for i in range(4)]
        assert firsts == list(METHODS[:4])

    def test_lossless_methods_say_what_plain_decoding_says(self, report):
        for row in report["rows"]:
            if row["method"] != "rapid":
                assert row["equal_to_plain"], row
                assert row["equal_to_lc"], row

    def test_a_method_that_answers_otherwise_is_not_called_equal(self, settings, monkeypatch):
        """The control: "lookup" reads the retrieved passages instead of the document."""
        ours = DecodeSettings.speculation
        monkeypatch.setattr(
            DecodeSettings, "speculation", lambda s, m: Speculation("rag") if m == "lookup" else ours(s, m)
        )
        found = bench_decode(settings_like(settings, methods=("lc", "lookup"), prompts=1), lambda line: None)
        assert {(r["method"], r["equal_to_plain"]) for r in found["rows"]} == {("lc", True), ("lookup", False)}
        assert [e["equal_to_plain"] for e in found["summary"]] == [1.0, 0.0]

    def test_the_parts_of_a_time_make_the_whole(self, report):
        for row in report["rows"]:
            parts = row["draft_s"] + row["verify_s"] + row["other_s"]
            assert parts == pytest.approx(row["decode_s"])
            assert row["decode_tokens_per_s"] == pytest.approx(row["completion_tokens"] / row["decode_s"])
            assert row["ttft_s"] > row["prefill_s"] > 0
            assert row["peak_rss_bytes"] > 1e7
            assert row["mean_acceptance_length"] == 1 + row["accepted"] / row["rounds"]
            if row["method"] in ("lc", "hf-plain"):
                assert row["acceptance_rate"] is None
                assert row["draft_s"] < 0.2 * row["decode_s"]
                assert row["rounds"] == row["completion_tokens"]
            if row["method"] in ("sd", "hf-assisted"):
                assert row["draft_s"] > 0
                assert 0 <= row["acceptance_rate"] <= 1

    def test_answers_of_a_fixed_length(self, settings, make_model_dir):
        """A model that would end at once is kept from it, on both sides alike."""
        found = bench_decode(
            settings_like(settings, methods=("hf-plain", "lc", "lookup"), fixed_length=True, repeats=1),
            lambda line: None,
        )
        assert {row["completion_tokens"] for row in found["rows"]} == {16}
        assert all(row["equal_to_lc"] for row in found["rows"])
        assert found["conditions"]["ends"] == "suppressed"

    def test_questions_on_one_text_share_its_reading(self, settings, tmp_path, task, monkeypatch):
        """Of three questions two are on one text: it is read once, and its reading is charged to all answers on it."""
        items = [json.loads(line) for line in Path(task).read_text().splitlines()[:2]]
        items = [items[0], items[1], {**items[0], "id": "again", "question": "When was the tower built?"}]
        path = tmp_path / "shared.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        opened = []
        open_ = Engine.open
        monkeypatch.setattr(Engine, "open", lambda self, *a, **o: opened.append(1) or open_(self, *a, **o))
        quick = settings_like(settings, tasks=(str(path),), prompts=3, methods=("hf-plain", "lc", "auto"), repeats=1)
        rows = bench_decode(quick, lambda line: None)["rows"]
        assert list(dict.fromkeys(row["prompt"] for row in rows)) == ["tower", "mill", "again"]
        assert len(opened) == 2
        ours = [row for row in rows if row["method"] != "hf-plain" and row["prompt"] != "tower"]
        assert len({row["prefill_s"] for row in ours}) == 1
        assert all(row["ttft_s"] > row["prefill_s"] > 0 for row in rows)
        assert all(row["equal_to_lc"] for row in rows)

    def test_the_report_so_far_is_saved_after_each_prompt(self, settings):
        sizes: list[int] = []
        quick = settings_like(settings, methods=("lc",), repeats=1)
        bench_decode(quick, lambda line: None, lambda found: sizes.append(len(found["rows"])))
        assert sizes == [1, 2]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"methods": ("lc", "magic")}, "hf-plain"),
            ({"methods": ("lc", "lc")}, "twice"),
            ({"contexts": ()}, "contexts"),
            ({"prompts": 0}, "prompts"),
            ({"contexts": (2000,)}, "window of 2048"),
            ({"prompts": 9}, "4 questions, not 9"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(self, settings, change, message):
        with pytest.raises(InvalidParameter, match=message):
            bench_decode(settings_like(settings, **change), lambda line: None)


def settings_like(settings: DecodeSettings, **change) -> DecodeSettings:
    return DecodeSettings(**{**vars(settings), **change})


def test_suppressed_ends_come_back(tiny_engine):
    model = tiny_engine.backend.target_model.model
    ids = torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    with without_ends([model, model], [0, 2]):
        during = model(input_ids=ids).logits
    assert torch.isneginf(during[..., [0, 2]]).all()
    kept = [i for i in range(during.shape[-1]) if i not in (0, 2)]
    assert torch.equal(during[..., kept], before[..., kept])
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_so_do_those_of_our_forward_pass(tiny_engine, length):
    """Short blocks, by plain and by blocked products."""
    model = tiny_engine.backend.target_model
    ids = list(range(5, 5 + length))
    before = model.run(ids, GrowingCache(model.num_layers), 0)
    with without_ends([model, model], [0, 2]):
        during = model.run(ids, GrowingCache(model.num_layers), 0)
    assert torch.isneginf(during[..., [0, 2]]).all()
    assert torch.equal(during[..., 3:], before[..., 3:])
    assert torch.equal(model.run(ids, GrowingCache(model.num_layers), 0), before)
    assert "run" not in vars(model)


PROMPT = [3 + (i * i) % 200 for i in range(400)]


@pytest.fixture(scope="module")
def peer(tiny_model_dir):
    from rapid.bench.peers import TransformersPeer

    target = assistant = tiny_model_dir
    return TransformersPeer(target, assistant, ["hf-assisted"], dtype="float32", device="cpu", end_ids=[2, 0])


class TestPeers:
    """transformers started from a filled cache says what it says from an empty one."""

    @pytest.mark.parametrize("method", ["hf-plain", "hf-lookup", "hf-assisted"])
    def test_it_is_generate_from_the_beginning(self, peer, tiny_engine, method):
        from transformers import GenerationConfig

        model = tiny_engine.backend.target_model.model
        config = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=[0, 2], pad_token_id=0)
        expected = model.generate(torch.tensor([PROMPT]), generation_config=config)[0, len(PROMPT) :]
        peer.read(PROMPT)
        run = peer.run(method, 24, 5)
        assert run.token_ids == expected.tolist()
        # Nothing but new tokens went through the model.
        assert run.rounds + run.drafted < 24 * 6

    def test_another_reading_gives_another_answer(self, peer):
        """The control: the cache that was read is what the answer rests on."""
        peer.read(PROMPT)
        answer = peer.run("hf-plain", 24, 5).token_ids
        other = [*reversed(PROMPT[:-1]), PROMPT[-1]]
        peer.read(other)
        assert peer.run("hf-plain", 24, 5).token_ids != answer


@pytest.fixture(scope="module")
def items(task):
    return load_items([task])


class TestPrompts:
    @pytest.mark.parametrize("context", [450, 700, 1500])
    def test_documents_have_the_length_asked_for(self, items, tiny_engine, context):
        prompter = tiny_engine.target_prompter
        prompts = choose(items, prompter, context, 4)
        assert len({prompt.id for prompt in prompts}) == 4
        for prompt in prompts:
            assert prompter.count(prompt.text) == pytest.approx(context, rel=0.1)

    def test_fitting_documents_come_first_and_whole(self, items, tiny_engine):
        (first, *_) = choose(items, tiny_engine.target_prompter, 640, 4)
        assert first.id == "tower"
        assert first.text == items[1].context

    def test_a_short_document_is_whole_within_others(self, items, tiny_engine):
        for prompt in choose(items, tiny_engine.target_prompter, 1500, 4):
            (own,) = [item.context for item in items if item.id == prompt.id]
            assert own in prompt.text
            assert not prompt.text.startswith(own)

    def test_kinds_take_turns(self, items, tiny_engine):
        metrics = [prompt.metric for prompt in choose(items, tiny_engine.target_prompter, 1500, 4)]
        assert set(metrics[:2]) == set(metrics[2:]) == {"qa_f1", "string_match_part"}

    def test_too_little_text_is_an_error(self, items, tiny_engine):
        with pytest.raises(InvalidParameter, match="too little text"):
            choose(items, tiny_engine.target_prompter, 50_000, 1)


def row(method: str, prompt: str, repeat: int, speed: float, *, context: int = 1, metric: str = "qa_f1") -> dict:
    times = {"draft_s": 1.0, "verify_s": 2.0, "other_s": 1.0, "decode_s": 4.0}
    place = {"method": method, "context": context, "prompt": prompt, "repeat": repeat, "metric": metric}
    return {**place, **times, "decode_tokens_per_s": speed, "equal_to_plain": True, "accepted": 3, "drafted": 4}


def test_ratios_are_paired_by_prompt():
    """Speeds differ tenfold between prompts; the ratio does not see it."""
    rows = [
        *(row("lc", "a", 0, 10.0), row("lc", "a", 1, 20.0), row("lc", "b", 0, 100.0), row("lc", "b", 1, 100.0)),
        *(row("auto", "a", 0, 20.0), row("auto", "a", 1, 40.0), row("auto", "b", 0, 50.0), row("auto", "b", 1, 50.0)),
        row("auto", "alone", 0, 1000.0),  # no lc beside it: no ratio
    ]
    _, auto = summarise(rows)["summary"]
    assert auto["ratio_to_lc"] == pytest.approx((2.0 + 0.5) / 2)
    assert auto["min_ratio_to_lc"] == 0.5
    assert auto["geomean_ratio_to_lc"] == pytest.approx(1.0)
    low, high = auto["geomean_ratio_to_lc_interval"]
    assert (low, high) == (pytest.approx(0.5), pytest.approx(2.0))
    assert auto["ratio_to_hf_plain"] is None
    assert auto["median_tokens_per_s"] == 50.0
    assert auto["acceptance_rate"] == 0.75
    assert (auto["draft_share"], auto["verify_share"], auto["other_share"]) == (0.25, 0.5, 0.25)


def test_groups_are_over_all_contexts_and_by_metric():
    rows = [
        *(row("lc", "a", 0, 1.0), row("lc", "b", 0, 1.0, context=2, metric="rougeLsum")),
        *(row("auto", "a", 0, 4.0), row("auto", "b", 0, 1.0, context=2, metric="rougeLsum")),
    ]
    groups = {(g["method"], g["context"], g["metric"]): g["geomean_ratio_to_lc"] for g in summarise(rows)["groups"]}
    assert groups["auto", None, None] == pytest.approx(2.0)
    assert groups["auto", None, "rougeLsum"] == pytest.approx(1.0)
    assert groups["auto", 1, None] == pytest.approx(4.0)
    assert ("auto", 1, "rougeLsum") not in groups


@pytest.fixture
def run(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        status = command.run(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


class TestCommands:
    def test_decode(self, run, task, tiny_model_dir, tmp_path):
        out, plot = tmp_path / "report.json", tmp_path / "plot.png"
        status, table, err = run(
            *("bench", "decode", "--target", tiny_model_dir, "--task", task, "--contexts", "500,900"),
            *("--methods", "hf-plain,lc,lookup", "--prompts", "1", "--max-new-tokens", "8", "--ranking", "bm25"),
            *("--output", str(out), "--plot", str(plot)),
        )
        assert status == 0
        assert "hf-plain: " in err
        header, *lines = table.splitlines()
        assert header.split()[:3] == ["method", "context", "tok/s"]
        assert [line.split()[:2] for line in lines] == [
            [method, context] for context in ("500", "900") for method in ("hf-plain", "lc", "lookup")
        ]
        assert all(line.endswith("100%") for line in lines)
        report = json.loads(out.read_text())
        assert report.keys() == {"conditions", "rows", "summary", "groups"}
        assert len(report["rows"]) == 6
        assert plot.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("method", OUR_METHODS)
    def test_session(self, run, task, tiny_model_dir, tmp_path, method):
        out = tmp_path / "report.json"
        status, table, _ = run(
            *("bench", "session", "--target", tiny_model_dir, "--task", task, "--contexts", "900"),
            *("--ranking", "bm25", "--max-new-tokens", "4", "--output", str(out), "--method", method),
        )
        assert status == 0
        assert table.splitlines()[1].endswith("yes")
        (measured,) = json.loads(out.read_text())["rows"]
        assert measured["same_answer"] is True
        assert 0 < measured["second_to_first"] < 1
        assert measured["restore_to_prefill"] == measured["restore_s"] / measured["prefill_s"]
        assert measured["file_bytes"] > 900 * 2 * 2 * 2 * 8 * 4  # keys, values; layers, heads, dimensions; float32

    def test_limits(self, run, tiny_model_dir):
        status, out, _ = run(
            *("bench", "limits", "--target", tiny_model_dir, "--contexts", "100,1000", "--blocks", "1,5"),
            *("--retrieved", "100", "--repeats", "2", "--json"),
        )
        assert status == 0
        report = json.loads(out)
        steps = [(r["model"], r["step"], r["context"]) for r in report["rows"]]
        assert steps == [
            *(("target", step, context) for context in (100, 1000) for step in ("decode", "verify 5")),
            ("draft", "decode", 100),
        ]
        for measured in report["rows"]:
            assert measured["bound_s"] == max(measured["memory_bound_s"], measured["compute_bound_s"]) > 0
            assert measured["ratio_to_bound"] == pytest.approx(measured["seconds"] / measured["bound_s"])
        decode = [r for r in report["rows"] if r["step"] == "decode"]
        assert decode[1]["read_bytes"] - decode[0]["read_bytes"] == 900 * 2 * 2 * 2 * 8 * 4

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("decode", "--methods", "lc,magic"), "hf-plain, hf-lookup"),
            (("decode", "--contexts", "4k"), "whole numbers"),
            (("decode", "--num-draft-tokens", "many"), "whole numbers"),
            (("decode", "--num-draft-tokens", "1000"), "between 0 and 128"),
            (("decode", "--output", "/no/such/directory/report.json"), "no such directory"),
            (("decode", "--target", "/no/such/model"), "does not exist"),
            (("session", "--task", "nonsense"), "task must be"),
            (("session", "--contexts", ""), "contexts"),
            (("session", "--method", "hf-plain"), "lc, lookup"),
            (("limits", "--contexts", "0"), "at least 1"),
        ],
    )
    def test_bad_usage_is_one_line_before_anything_is_loaded(self, run, monkeypatch, arguments, message):
        monkeypatch.setattr("rapid.engine.Engine.load", lambda *a, **k: pytest.fail("loaded a model"))
        status, out, err = run("bench", *arguments)
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert message in err


class TestLimits:
    def test_the_bytes_of_a_step(self, tiny_engine):
        """Untied: all parameters but the embedding table, which is only looked up."""
        from rapid.bench.limits import step_flops, stored_bytes

        model = tiny_engine.backend.target_model
        table = model.model.get_input_embeddings().weight.numel()
        assert stored_bytes(model) == 4 * (model.num_parameters - table)
        assert step_flops(model, 1000) - step_flops(model, 0) == 4 * 1000 * 2 * 4 * 8

    def test_rates_are_of_this_world(self):
        from rapid.bench.limits import product_rate

        assert 1e8 < product_rate(torch.device("cpu"), torch.float32, 1) < 1e14


class TestProcess:
    def test_the_thresholds_are_taken_by_glibc(self):
        program = "from rapid.bench.process import raise_malloc_thresholds as f; print(f())"
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        thresholds = eval(found.stdout)
        assert thresholds.keys() == {"mmap_threshold", "trim_threshold"}
        if sys.platform == "linux" and Path("/lib64/ld-linux-x86-64.so.2").exists():
            assert thresholds["mmap_threshold"] >= 2**25

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can restart the peak")
    def test_a_peak_is_forgotten(self):
        program = (
            "from rapid.bench.process import peak_rss, restart_peak_rss\n"
            "block = b'x' * 2**28; high = peak_rss(); del block; restart_peak_rss(); print(high - peak_rss())"
        )
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert int(found.stdout) > 2**27


def test_the_geometric_mean_of_one_prompt_has_no_interval():
    (lc,) = summarise([row("lc", "a", 0, 10.0)])["summary"]
    assert lc["geomean_ratio_to_lc"] == 1.0
    assert lc["geomean_ratio_to_lc_interval"] is None
    assert math.isclose(lc["min_ratio_to_lc"], 1.0)
