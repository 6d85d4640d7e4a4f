"""Summaries and reports of runs that are made up here. None of these numbers was measured."""

import base64
import json
import random
import re
from html.parser import HTMLParser

import pytest

from rapid.errors import DocumentError
from rapid.evals.aggregate import Place, gather
from rapid.evals.configuration import Configuration, Key, grid
from rapid.evals.report.comparisons import compare
from rapid.evals.report.markdown import render_markdown
from rapid.evals.report.model import Report, Section, Table
from rapid.evals.report.page import render_html
from rapid.evals.report.sensitivity import eta_points, length_points
from rapid.evals.results import Result, Timing
from rapid.evals.store import RunStore
from rapid.evals.summary import summarise

REQUIRED = {
    "task",
    "split",
    "method",
    "eta",
    "law",
    "metric",
    "score",
    "ci_low",
    "ci_high",
    "n",
    "acceptance_rate",
    "decode_speedup",
    "prefill_s",
}
MANIFEST = {
    "settings": {"target": "<b>made-up</b> | model"},
    "models": {},
    "data": {},
    "environment": {"cores": 2},
}
LC = Configuration("lc", seed=0)
SD = Configuration("sd", 0.0, "exact", None, 10, seed=0)
RAPID = Configuration("rapid", 10.0, "paper", 0.1, 10, seed=0)


def make_result(task, item, configuration, score, **changes):
    drafts = configuration.method not in ("lc", "rag")
    values = {
        "metric": "mc_accuracy",
        "prediction": "A",
        "finish_reason": "stop",
        "prompt_tokens": 4000,
        "completion_tokens": 20,
        "drafted": 100 if drafts else 0,
        "accepted": 70 if drafts else 0,
        "timing": Timing(prefill_s=3.0, draft_prefill_s=0.5 if drafts else 0.0, decode_s=1.0),
    }
    return Result(task, item, configuration, score=score, **{**values, **changes})


def test_variants_are_in_one_order_however_the_run_was_extended():
    configurations = grid(["lc", "rag", "sd", "rapid"], etas=[5.0, 10.0, 20.0], laws=["paper", "transfer"])
    expected = ["lc", "rag", "sd", "5 paper", "10 paper", "20 paper", "5 transfer", "10 transfer", "20 transfer"]
    for seed in range(3):
        random.Random(seed).shuffle(configurations)
        results = [make_result("t", "i", configuration, 1.0) for configuration in configurations]
        (variants,) = gather(results).values()
        assert [v.label.removeprefix("rapid η=") for v in variants] == expected


def made_up_run(tasks=("longbench_v2", "mine<&>|*", "ruler_vt")):
    """Results of every method on several tasks, drawn at random."""
    rng = random.Random(0)
    metrics = {"longbench_v2": "mc_accuracy", "ruler_vt": "string_match_all"}
    configurations = grid(["lc", "rag", "sd", "rapid"], etas=[5.0, 10.0, 20.0], laws=["paper", "transfer"])
    results = []
    for task in tasks:
        metric = metrics.get(task, "rougeLsum" if task.startswith("inf") else "qa_f1")
        for number in range(60):
            ability = rng.random()
            tokens = 2 ** rng.randint(11, 15) - rng.randint(0, 200)
            splits = {
                "longbench_v2": {"difficulty": "easy" if number % 3 else "hard", "length": "short"},
                "ruler_vt": {"length": str(4096 if number % 2 else 8192)},
            }.get(task, {})
            for configuration in configurations:
                eta = configuration.eta or 0.0
                draw = ability + rng.gauss(0.004 * eta, 0.15)
                score = float(draw > 0.5) if metric == "mc_accuracy" else min(1.0, max(0.0, draw))
                fast = {"lc": 1.0, "rag": 0.3}.get(configuration.method, 1.1 - tokens / 60_000 - eta / 100)
                drafts = configuration.method in ("sd", "rapid")
                results.append(
                    make_result(
                        task,
                        f"i{number}",
                        configuration,
                        score,
                        metric=metric,
                        splits=splits,
                        prediction="" if number == 7 else "A",
                        prompt_tokens=tokens,
                        accepted=round(60 + eta + rng.random()) if drafts else 0,
                        timing=Timing(0.1, tokens / 1000, 0.4 if drafts else 0.0, fast),
                    )
                )
    return results


def store_run(directory, results):
    with RunStore(directory, MANIFEST) as store:
        for result in results:
            store.append(result)
        store.finish([result.key for result in results], summarise(results))
    return directory


def test_summary_of_a_hand_made_run():
    scores = {LC: [1, 0, 0, 1], RAPID: [1, 1, 0, 1]}
    results = [
        make_result(
            "t",
            f"i{number}",
            configuration,
            float(score),
            splits={"difficulty": "easy" if number < 2 else "hard"},
            prediction="" if score == 0 else "A",
            timing=Timing(0.5, 3.0, 0.25, 1.0 if configuration is LC else 0.5),
        )
        for configuration, of_one in scores.items()
        for number, score in enumerate(of_one)
    ]
    rows = summarise(results)
    assert all(rows_keys >= REQUIRED for rows_keys in map(set, rows))
    assert {row["split"] for row in rows} == {"all", "difficulty=easy", "difficulty=hard"}
    by = {(row["method"], row["split"]): row for row in rows}
    lc, rapid = by["lc", "all"], by["rapid", "all"]
    assert (lc["score"], rapid["score"], rapid["n"], lc["empty"]) == (50.0, 75.0, 4, 2)
    assert by["rapid", "difficulty=easy"]["score"] == 100.0
    assert rapid["ci_low"] <= 75.0 <= rapid["ci_high"]
    assert (lc["acceptance_rate"], rapid["acceptance_rate"]) == (None, 0.7)
    assert (lc["decode_speedup"], rapid["decode_speedup"]) == (1.0, 2.0)
    assert rapid["prefill_s"] == pytest.approx(3.75)
    json.dumps(rows, allow_nan=False)


def test_seeds_are_averaged_within_an_item():
    seeds = [Configuration("lc", seed=seed) for seed in range(4)]
    results = [make_result("t", item, c, float(item == "a")) for item in ("a", "b") for c in seeds]
    (row,) = summarise(results)
    assert (row["n"], row["score"]) == (2, 50.0)
    assert "seed" not in row


def test_without_lc_there_is_no_speedup():
    (row,) = summarise([make_result("t", "a", RAPID, 1.0)])
    assert row["decode_speedup"] is None


def test_items_of_two_tasks_with_one_id_stay_apart():
    results = [make_result(task, "a", c, 1.0) for task in ("t", "u") for c in (LC, RAPID)]
    assert [row["n"] for row in summarise(results)] == [1, 1, 1, 1]


def test_a_gain_like_the_noise_is_not_called_better():
    """sd differs from lc on every tenth item each way; rapid gains on as many items, and on many more."""

    def run(gained):
        results = []
        for number in range(100):
            base = float(number % 2)
            sd = 1.0 - base if number < 20 else base
            rapid = 1.0 if number < gained else base
            results += [make_result("t", f"i{number}", c, s) for c, s in ((LC, base), (SD, sd), (RAPID, rapid))]
        comparisons = compare(gather(results))
        return next(c for c in comparisons if c.variant.method == "rapid" and c.against.method == "lc")

    small, large = run(14), run(60)
    assert small.gain.low > 0
    assert small.floor > small.gain.value > 0
    assert small.reading == "within the noise floor"
    assert (large.changes.rescued, large.changes.broken) == (30, 0)
    assert large.test.wins == 30
    assert large.reading == "better"


def test_each_pair_is_compared_once():
    comparisons = compare(gather(made_up_run(("t",))))
    pairs = [(c.variant.method, c.against.method) for c in comparisons]
    assert pairs.count(("sd", "lc")) == 1
    assert pairs.count(("rag", "lc")) == 1
    assert ("lc", "rag") not in pairs
    assert pairs.count(("rapid", "sd")) == 6


def test_baselines_share_the_retrieval_budget():
    results = []
    for budget, score in ((512, 0.0), (1024, 1.0)):
        results += [
            make_result("t", "a", Configuration("rag", context_budget=budget), score),
            make_result("t", "a", Configuration("rapid", 10.0, "paper", 0.1, 10, budget), 1.0),
        ]
    gains = {c.variant.context_budget: c.gain.value for c in compare(gather(results))}
    assert gains == {512: 1.0, 1024: 0.0}


def test_eta_curves_start_at_sd():
    points = eta_points(gather(made_up_run(("t",))))
    paper = [point.eta for point in points if point.curve == "rapid paper"]
    assert paper == [0.0, 5.0, 10.0, 20.0]
    assert {point.place for point in points} == {Place("t", "qa_f1")}


def test_lengths_are_binned_by_powers_of_two():
    results = [
        make_result("t", f"i{tokens}", c, 1.0, prompt_tokens=tokens)
        for tokens in (4096, 4097, 8192)
        for c in (LC, RAPID)
    ]
    assert [(p.length, p.items, p.speedup) for p in length_points(results)] == [(4096, 1, 1.0), (8192, 2, 1.0)]


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []
        self.sources = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]


def test_report_of_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    from rapid.evals.report.build import write_report

    store_run(tmp_path, made_up_run())
    written = write_report(tmp_path)
    assert {path.name for path in written} >= {"report.html", "report.md", "summary.json"}
    pngs = [path for path in written if path.suffix == ".png"]
    assert {path.stem for path in pngs} == {"scores", "rescued-broken", "eta", "context-length"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pngs)

    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(html)
    assert "b" not in page.tags  # the manifest's <b> is shown, not obeyed
    assert "&lt;b&gt;made-up&lt;/b&gt;" in html
    assert "mine&lt;&amp;&gt;|*" in html
    # one file: every picture is inside
    assert len(page.sources) == len(pngs)
    embedded = {base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in page.sources}
    assert embedded == {path.read_bytes() for path in pngs}
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings == [
        "Scores",
        "Scores by split",
        "RULER",
        "Noise floor",
        "Comparisons",
        "Rescued and broken items",
        "Sensitivity to η",
        "Sensitivity to context and retrieval length",
        "Conditions",
    ]

    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "plots/eta.png" in markdown
    assert r"mine&lt;&amp;&gt;\|\*" in markdown
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert {row["task"] for row in rows} == {"longbench_v2", "mine<&>|*", "ruler_vt"}


def test_infinitebench_has_its_average(tmp_path):
    pytest.importorskip("matplotlib")
    from rapid.evals.report.build import write_report

    tasks = [f"infinitebench_{name}" for name in ("en_qa", "en_mc", "en_sum")]
    results = [
        make_result(task, "a", configuration, score, metric=task)
        for task, score in zip(tasks, (0.3, 0.6, 0.0), strict=True)
        for configuration in (LC, SD)
    ]
    store_run(tmp_path, results)
    write_report(tmp_path)
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    header = next(line for line in markdown.splitlines() if "∞Bench average" in line)
    place = header.split(" | ").index("∞Bench average")
    lc = next(line for line in markdown.splitlines() if line.startswith("| lc |"))
    assert lc.split(" | ")[place] == "30.0"


@pytest.mark.parametrize("results", [[make_result("t", "a", LC, 1.0)], [make_result("t", "a", RAPID, 0.0)]])
def test_the_smallest_runs_have_reports(tmp_path, results):
    pytest.importorskip("matplotlib")
    from rapid.evals.report.build import write_report

    store_run(tmp_path, results)
    assert write_report(tmp_path)
    assert "Not measured" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_run_without_results_is_one_clear_error(tmp_path):
    pytest.importorskip("matplotlib")
    from rapid.evals.report.build import write_report

    with RunStore(tmp_path, MANIFEST) as store:
        assert store.missing([Key("t", "a", LC)])
    with pytest.raises(DocumentError, match="no finished items"):
        write_report(tmp_path)


def test_texts_start_no_markup():
    hostile = "<script>alert(1)</script> [x](y) `z` **b** a|b\n# h"
    table = Table([hostile], [[hostile]], title=hostile)
    report = Report(hostile, [Section(hostile, [hostile], [table])])
    page = Page()
    page.feed(render_html(report))
    assert "script" not in page.tags
    markdown = render_markdown(report, "plots")
    assert "<script" not in markdown
    assert not re.search(r"(?<!\\)[`\[]", markdown)
    assert len([line for line in markdown.splitlines() if line.startswith("# ")]) == 1
