"""`rapid eval run|report|tune|judge`: measure answers and speed on benchmarks or one's own items."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rapid.cli.eval_options import (
    Alphas,
    AsJson,
    Etas,
    ExperimentOptions,
    Laws,
    Output,
    Seeds,
    Tasks,
    TimeLimit,
    configurations,
)
from rapid.cli.grouping import grouped
from rapid.cli.options import PairOptions
from rapid.cli.progress import stage_progress
from rapid.params import Speculation

if TYPE_CHECKING:
    from rapid.evals.experiment import Experiment
    from rapid.evals.runner import Progress, RunOptions

app = typer.Typer(name="eval", help="Measure answers and speed.", no_args_is_help=True, rich_markup_mode=None)

_STOPPED = "rapid: stopped at the time limit; the same command goes on where it stopped\n"


@app.command("run")
@grouped
def run_command(
    output: Output,
    task: Tasks,
    *,
    methods: Annotated[str, typer.Option(help="Comma-separated; see `rapid ask`.")] = "lc,rag,sd,rapid",
    eta: Etas = "10",
    law: Laws = Speculation.law,
    alpha: Alphas = f"{Speculation.alpha:g}",
    num_draft_tokens: Annotated[
        str, typer.Option(help="Tokens drafted per round (gamma), or auto; comma-separated.")
    ] = "10",
    context_budget: Annotated[
        str, typer.Option(help="Retrieved tokens at most, comma-separated; auto is the paper's rule.")
    ] = "auto",
    retrieval: Annotated[
        str, typer.Option(help="related, and unrelated: drafters read passages of another text (robustness test).")
    ] = "related",
    seed: Seeds = "0",
    loading: PairOptions,
    experimenting: ExperimentOptions,
    time_limit: TimeLimit = None,
    as_json: AsJson = False,
) -> None:
    """Answer the tasks' items by every method. Finished answers are kept: the same command resumes or extends a run."""
    from rapid.evals.questions import write_questions
    from rapid.evals.runner import run
    from rapid.evals.store import RunStore
    from rapid.evals.summary import summarise

    wanted = configurations(
        methods, eta, law, alpha, num_draft_tokens, context_budget=context_budget, retrieval=retrieval, seed=seed
    )
    asked = experimenting.experiment(task, loading.models())
    with stage_progress() as progress:
        opened = asked.open(progress)
    with RunStore(output, opened.manifest) as store:
        write_questions(store.directory, opened.readings)
        left = run(opened.engine, store, opened.readings, wanted, _run_options(asked, time_limit))
        results = store.results
    if left:
        sys.stderr.write(_STOPPED)
    if as_json:
        _print_json({"output": output, "finished": len(results), "left": left, "rows": summarise(results)})
    else:
        typer.echo(f"{output}: see summary.json, or write a report with: rapid eval report {output}")


@app.command("tune")
@grouped
def tune_command(
    output: Output,
    task: Tasks,
    *,
    eta: Etas = "5,10,20,40",
    law: Laws = "paper,transfer",
    alpha: Alphas = f"{Speculation.alpha:g}",
    num_draft_tokens: Annotated[str, typer.Option(help="Tokens drafted per round (gamma), comma-separated.")] = "10",
    seed: Seeds = "0",
    fraction: Annotated[float, typer.Option(help="Share of the documents to choose by.")] = 0.5,
    loading: PairOptions,
    experimenting: ExperimentOptions,
    time_limit: TimeLimit = None,
    as_json: AsJson = False,
) -> None:
    """Choose eta, law, alpha and gamma on some documents, report on the others. May go on from a run of `eval run`."""
    from rapid.evals.configuration import Configuration
    from rapid.evals.questions import write_questions
    from rapid.evals.store import RunStore
    from rapid.evals.tune import TUNING, default_configuration, tune

    candidates = configurations("rapid", eta, law, alpha, num_draft_tokens, seed=seed)
    asked = experimenting.experiment(task, loading.models())
    with stage_progress() as progress:
        opened = asked.open(progress)
    options = _run_options(asked, time_limit)
    default = default_configuration(opened.engine)
    with RunStore(output, opened.manifest) as store:
        write_questions(store.directory, opened.readings)
        report = tune(opened.engine, store, opened.readings, candidates, default, options, fraction=fraction)
    if report is None:
        sys.stderr.write(_STOPPED)
    if as_json:
        _print_json({"output": output, "left": report is None, **(report or {})})
    elif report is not None:
        typer.echo(f"chosen: {Configuration(**report['chosen']).label}; see {output}/{TUNING}")


@app.command("judge")
def judge_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory of a run.", show_default=False)],
    base_url: Annotated[
        str,
        typer.Option(
            help="The judge's OpenAI-compatible endpoint, such as http://localhost:8000/v1; its key is "
            "read from OPENAI_API_KEY.",
            show_default=False,
        ),
    ],
    model: Annotated[str, typer.Option(help="The judge's name there.", show_default=False)],
    votes: Annotated[int, typer.Option(help="Replies asked for each answer.", min=1)] = 1,
    judge_temperature: Annotated[float, typer.Option("--temperature", help="The judge's; 0 is greedy.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Have a language model rate a run's answers from 1 to 10; its prompts and votes are kept."""
    from rapid.evals.judge import JUDGE, Endpoint, judge

    with stage_progress() as progress:
        report = (lambda done, total: progress("Judging", done, total)) if progress else None
        rows = judge(directory, Endpoint(base_url, model, judge_temperature), num_votes=votes, on_progress=report)
    if as_json:
        _print_json({"output": directory, "rows": rows})
    else:
        typer.echo(f"see {directory}/{JUDGE}")


@app.command()
def report(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory of a run.", show_default=False)],
) -> None:
    """Write report.html, report.md and plots of a run, finished or not."""
    from rapid.evals.report.build import write_report

    for path in write_report(directory):
        typer.echo(str(path))


def show_progress(progress: Progress) -> None:
    """One line on stderr for each answer."""
    result = progress.result
    sys.stderr.write(
        f"[{progress.done}/{progress.total}] {result.task} {result.item}, {result.configuration.label}: "
        f"{result.metric} {result.score:.2f}, {progress.seconds:.1f} s, {_duration(progress.left_s)} left\n"
    )
    sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _run_options(experiment: Experiment, time_limit: float | None) -> RunOptions:
    """`time_limit` in minutes, from now on."""
    from rapid.evals.runner import RunOptions

    deadline = None if time_limit is None else time.monotonic() + 60 * time_limit
    # Each of these logs how it builds an index, to whoever has set up logging; rouge-score has.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return RunOptions(experiment.ask, deadline, show_progress)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))
