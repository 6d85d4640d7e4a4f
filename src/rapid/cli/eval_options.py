"""Options that the commands of `rapid eval` share, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rapid.cli import options
from rapid.cli.lists import decimal, names, whole_number, whole_numbers
from rapid.errors import InvalidParameter
from rapid.params import Models, Ranking, Retrieval

if TYPE_CHECKING:
    from rapid.evals.configuration import Configuration
    from rapid.evals.experiment import Experiment

Output = Annotated[str, typer.Option(help="Directory of the run; an unfinished one is resumed.", show_default=False)]
Tasks = Annotated[
    list[str],
    typer.Option(
        "--task",
        help="sample, dialogue, longbench_v2[_cot|_no_context], infinitebench_en_qa|en_mc|en_sum, ruler_NAME, each "
        "also as NAME:FILE with a local file in the hub's format; or FILE.jsonl. May be repeated.",
        show_default=False,
    ),
]
Etas = Annotated[str, typer.Option("--eta", help="Etas of rapid, comma-separated; ETA:LAW ties one to a law.")]
Laws = Annotated[str, typer.Option("--law", help="Laws of rapid, comma-separated.")]
Alphas = Annotated[str, typer.Option("--alpha", help="Alphas of rapid, comma-separated.")]
Seeds = Annotated[str, typer.Option("--seed", help="Seeds, comma-separated: each item is answered once with each.")]
TimeLimit = Annotated[
    float | None, typer.Option(help="Stop after this many minutes; the same command goes on.  [default: none]", min=0)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def configurations(
    methods: str,
    eta: str,
    law: str,
    alpha: str,
    num_draft_tokens: str,
    *,
    context_budget: str = "auto",
    retrieval: str = "related",
    seed: str,
) -> list[Configuration]:
    """Every combination of comma-separated settings that makes a difference, once."""
    from rapid.evals.configuration import grid

    found = [
        configuration
        for gamma in names(num_draft_tokens)
        for etas, laws in _etas_and_laws(eta, law)
        for configuration in grid(
            names(methods),
            etas=etas,
            laws=laws,
            alphas=[decimal("--alpha", number) for number in names(alpha)],
            num_draft_tokens=None if gamma == "auto" else whole_number("--num-draft-tokens", gamma),
            context_budgets=[
                None if b == "auto" else whole_number("--context-budget", b) for b in names(context_budget)
            ],
            retrievals=cast(Any, names(retrieval)),
            seeds=whole_numbers("--seed", seed),
        )
    ]
    if not found:
        raise InvalidParameter("nothing to run; name at least one method, eta, law, alpha, budget and seed each")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class ExperimentOptions:
    """What is asked of whom, besides the models and configurations."""

    ranking: options.Ranking = Retrieval.ranking
    embedder: options.Embedder = Retrieval.embedder
    chunk_tokens: options.ChunkTokens = Retrieval.chunk_tokens
    limit: Annotated[int | None, typer.Option(help="First items of each task only.  [default: all]", min=1)] = None
    min_tokens: Annotated[int | None, typer.Option(help="Only documents of at least this many target tokens.")] = None
    max_tokens: Annotated[int | None, typer.Option(help="Only documents of at most this many target tokens.")] = None
    quickest_first: Annotated[
        bool, typer.Option("--quickest-first", help="Begin with short documents, many questions, short answers.")
    ] = False
    max_new_tokens: Annotated[int | None, typer.Option(help="Answer length.  [default: each task's own]", min=1)] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut the user message to this many tokens.  [default: what fits the window]", min=1),
    ] = None
    temperature: options.Temperature = 0.0
    top_p: options.TopP = 1.0
    extraction: Annotated[
        str, typer.Option(help="LongBench v2 letters: strict (its own rule) or lenient (RAPID's).")
    ] = "strict"
    length: Annotated[int, typer.Option(help="Tokens of each RULER item or dialogue.")] = 4096
    num_samples: Annotated[int, typer.Option(help="Items of each RULER or dialogue task.", min=1)] = 500

    def experiment(self, tasks: list[str], models: Models) -> Experiment:
        """The experiment on `tasks`. Raises `InvalidParameter`."""
        from rapid.evals.asking import AskSettings
        from rapid.evals.experiment import Experiment, Selection
        from rapid.evals.tasks.registry import TaskOptions

        retrieval = Retrieval(cast(Ranking, self.ranking), self.embedder, self.chunk_tokens)
        return Experiment(
            tasks,
            models,
            AskSettings(retrieval, self.temperature, self.top_p, self.max_new_tokens, self.prompt_tokens),
            TaskOptions(cast(Any, self.extraction), self.length, num_samples=self.num_samples),
            Selection(self.limit, self.min_tokens, self.max_tokens, self.quickest_first),
        )


def _etas_and_laws(eta: str, law: str) -> list[tuple[list[float], list[str]]]:
    """Etas with the laws each is run with: those of --law, or its own."""
    pairs: list[tuple[list[float], list[str]]] = []
    for entry in names(eta):
        number, _, own = entry.partition(":")
        pairs.append(([decimal("--eta", number)], [own] if own else names(law)))
    return pairs
