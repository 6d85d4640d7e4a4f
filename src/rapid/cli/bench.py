"""`rapid bench decode|session|limits`: how fast answers are here, and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from rapid.cli import options
from rapid.cli.grouping import grouped
from rapid.cli.lists import names, whole_number, whole_numbers
from rapid.cli.tables import number, table
from rapid.errors import InvalidParameter
from rapid.params import Ranking, Retrieval

app = typer.Typer(name="bench", help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)

Task = Annotated[
    list[str] | None,
    typer.Option(help="sample, or FILE.jsonl with documents and questions; may be repeated.  [default: sample]"),
]
Output = Annotated[str | None, typer.Option(metavar="FILE", help="Write the report here, as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")]
Contexts = Annotated[str, typer.Option(help="Document lengths in target tokens, comma-separated.")]


@app.command()
@grouped
def decode(
    *,
    loading: options.ModelOptions,
    contexts: Contexts = "4000,7500",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated. hf-plain, hf-lookup, hf-assisted: transformers' own generate. lc, lookup, sd, "
            "rapid: as for `rapid ask`. auto: lossless rapid with drafter and draft length chosen by the governor."
        ),
    ] = "hf-plain,lc,lookup,sd,rapid,auto",
    task: Task = None,
    prompts: Annotated[int, typer.Option(help="Questions per context.", min=1)] = 3,
    repeats: Annotated[int, typer.Option(help="Answers to each question by each method.", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 64,
    fixed_length: Annotated[
        bool, typer.Option("--fixed-length", help="Suppress the end of answers: all have --max-new-tokens.")
    ] = False,
    num_draft_tokens: Annotated[
        str, typer.Option(help="Tokens drafted per round by all methods but auto; auto: lookup and sd are governed.")
    ] = "10",
    eta: Annotated[float, typer.Option(help="Strength of the knowledge transfer of rapid.")] = 10.0,
    ranking: options.Ranking = Retrieval.ranking,
    output: Output = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw speed and where the time goes, as PNG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decode real questions on real documents by several methods in turn, and compare speed and text."""
    from rapid.bench.decode import DecodeSettings, bench_decode
    from rapid.evals.files import write_bytes, write_json

    settings = DecodeSettings(
        models=loading.models(),
        contexts=whole_numbers("--contexts", contexts),
        methods=names(methods),
        tasks=task or ["sample"],
        prompts=prompts,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        fixed_length=fixed_length,
        num_draft_tokens=None if num_draft_tokens == "auto" else whole_number("--num-draft-tokens", num_draft_tokens),
        eta=eta,
        retrieval=Retrieval(cast(Ranking, ranking)),
    )
    for method in settings.methods:
        if not method.startswith("hf-"):
            settings.speculation(method)
    out, picture = _destination(output), _destination(plot)
    report = bench_decode(settings, _say, lambda found: write_json(out, found) if out else None)
    if picture:
        from rapid.bench.plot import plot_decode

        write_bytes(picture, plot_decode(report))
    typer.echo(json.dumps(report) if as_json else decode_table(report))


@app.command()
@grouped
def session(
    *,
    loading: options.ModelOptions,
    contexts: Contexts = "4000,7500",
    method: Annotated[str, typer.Option(help="lc, lookup, sd, rapid or auto, as for `rapid bench decode`.")] = "auto",
    task: Task = None,
    prompts: Annotated[int, typer.Option(help="Documents per context.", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 16,
    ranking: options.Ranking = Retrieval.ranking,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time a first question, a second one, and both ends of saving a session."""
    from rapid.bench.session import SessionSettings, bench_session

    settings = SessionSettings(
        models=loading.models(),
        contexts=whole_numbers("--contexts", contexts),
        tasks=task or ["sample"],
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        method=method,
        retrieval=Retrieval(cast(Ranking, ranking)),
    )
    out = _destination(output)
    _finish(bench_session(settings, _say), out, as_json, session_table)


@app.command()
@grouped
def limits(
    *,
    loading: options.ModelOptions,
    contexts: Contexts = "1000,4000,7500",
    blocks: Annotated[str, typer.Option(help="Tokens of a forward pass, comma-separated; 1 is a decode step.")] = (
        "1,5,11"
    ),
    retrieved: Annotated[int, typer.Option(help="Tokens the drafter has read.", min=1)] = 1000,
    repeats: Annotated[int, typer.Option(help="Timings of each step.", min=1)] = 9,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure memory and arithmetic of this machine, and how far each step is from the bound they give."""
    from rapid.bench.limits import LimitsSettings, bench_limits

    settings = LimitsSettings(
        models=loading.models(),
        contexts=whole_numbers("--contexts", contexts),
        blocks=whole_numbers("--blocks", blocks),
        retrieved=retrieved,
        repeats=repeats,
    )
    out = _destination(output)
    _finish(bench_limits(settings, _say), out, as_json, limits_table)


def decode_table(report: dict[str, Any]) -> str:
    """Speeds and ratios; a geometric mean with its interval over prompts."""
    rows = [
        [
            entry["method"],
            str(entry["context"]),
            number(entry["median_tokens_per_s"], 1),
            number(entry["ratio_to_lc"]),
            number(entry["min_ratio_to_lc"]),
            _with_interval(entry["geomean_ratio_to_lc"], entry["geomean_ratio_to_lc_interval"]),
            number(entry["ratio_to_hf_plain"]),
            number(entry["acceptance_rate"]),
            *(number(None if (s := entry[f"{p}_share"]) is None else 100 * s, 0) for p in ("draft", "verify", "other")),
            f"{entry['equal_to_plain']:.0%}",
        ]
        for entry in report["summary"]
    ]
    columns = ["method", "context", "tok/s", "/lc", "min", "geomean [95 %]", "/hf-plain", "accepted"]
    return table([*columns, "draft %", "verify %", "other %", "equal"], rows)


def session_table(report: dict[str, Any]) -> str:
    """Seconds to the first token, and what a reading that is kept spares."""
    rows = [
        [
            str(entry["context"]),
            *(number(entry[name]) for name in ("ttft_first_s", "ttft_second_s", "save_s", "restore_s")),
            number(entry["ttft_restored_s"]),
            f"{entry['second_to_first']:.1%}",
            f"{entry['restore_to_prefill']:.1%}",
            "yes" if entry["same_answer"] else "NO",
        ]
        for entry in report["summary"]
    ]
    columns = ["context", "first s", "second s", "save s", "restore s", "restored s", "second/first"]
    return table([*columns, "restore/prefill", "same answer"], rows)


def limits_table(report: dict[str, Any]) -> str:
    """Milliseconds beside their bounds, under the machine's rates."""
    machine = report["machine"]
    rows = [
        [
            f"{row['model']} {row['step']}",
            str(row["context"]),
            number(1e3 * row["seconds"], 1),
            number(1e3 * row["memory_bound_s"], 1),
            number(1e3 * row["compute_bound_s"], 1),
            number(row["ratio_to_bound"], 1),
        ]
        for row in report["rows"]
    ]
    return (
        f"reads {machine['read_bytes_per_s'] / 1e9:.1f} GB/s, copies {machine['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"products {machine['flops_per_s'] / 1e9:.0f} GFLOP/s\n"
        + table(["step", "context", "ms", "memory bound", "compute bound", "ms/bound"], rows)
    )


def _finish(report: dict[str, Any], out: Path | None, as_json: bool, show: Any) -> None:
    from rapid.evals.files import write_json

    if out:
        write_json(out, report)
    typer.echo(json.dumps(report) if as_json else show(report))


def _destination(name: str | None) -> Path | None:
    """Where a file will go, refused before minutes of measuring rather than after."""
    if name is None:
        return None
    path = Path(name)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise InvalidParameter(f"{name} cannot be written: no such directory, or a directory itself; name a file")
    return path


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None or interval is None:
        return number(value)
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
