"""What an item is answered by: a method with its settings, and the grid of them that a run compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from rapid.errors import InvalidParameter
from rapid.params import DRAFT_TOKENS_LOSSY, METHODS, Speculation

Relation = Literal["related", "unrelated"]


@dataclass(frozen=True)
class Configuration:
    """A method with everything that may change its answers; None where a setting does not apply to it.

    num_draft_tokens  None also where the governor chooses.
    context_budget    most retrieved tokens; None for the default rule.
    retrieval         `unrelated`: the drafter reads passages of another document (the paper's robustness test).
    """

    method: str
    eta: float | None = None
    law: str | None = None
    alpha: float | None = None
    num_draft_tokens: int | None = None
    context_budget: int | None = None
    retrieval: Relation = "related"
    seed: int | None = None

    @property
    def label(self) -> str:
        """A short name for tables, without the seed."""
        parts = [self.method]
        if self.method == "rapid":
            parts += [f"η={self.eta:g}" if self.eta is not None else "η=default", self.law or ""]
            parts += [f"α={self.alpha:g}"] if self.alpha not in (None, Speculation.alpha) else []
        if self.method not in ("lc", "rag") and self.num_draft_tokens != DRAFT_TOKENS_LOSSY:
            parts.append(f"γ={'auto' if self.num_draft_tokens is None else self.num_draft_tokens}")
        parts += [f"{self.context_budget} retrieved"] if self.context_budget is not None else []
        parts += ["unrelated"] if self.retrieval == "unrelated" else []
        return " ".join(part for part in parts if part)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return asdict(self)


SETTINGS = tuple(field.name for field in fields(Configuration))


class Key(NamedTuple):
    """What one result line answers."""

    task: str
    item: str
    configuration: Configuration


def grid(
    methods: Sequence[str],
    *,
    etas: Sequence[float | None] = (None,),
    laws: Sequence[str] = (Speculation.law,),
    alphas: Sequence[float] = (Speculation.alpha,),
    num_draft_tokens: int | None = DRAFT_TOKENS_LOSSY,
    context_budgets: Sequence[int | None] = (None,),
    retrievals: Sequence[Relation] = ("related",),
    seeds: Sequence[int] = (0,),
) -> list[Configuration]:
    """Every combination that makes a difference, once, in the given order.

    Eta, law and alpha vary `rapid` only: `sd` and the other lossless drafters have eta 0 and the exact law, `lc`
    and `rag` draft nothing. Budget and relation vary whatever reads retrieved passages.
    """
    for relation in retrievals:
        if relation not in get_args(Relation):
            raise InvalidParameter(f"retrieval must be related or unrelated, got {relation!r}")
    for method in methods:
        if method not in METHODS:
            raise InvalidParameter(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    for eta, law, alpha in product(etas, laws, alphas):
        Speculation(eta=eta, law=law, alpha=alpha)  # type: ignore[arg-type]
    found: dict[Configuration, None] = {}
    for method, seed, budget, relation, law, alpha, eta in product(
        methods, seeds, context_budgets, retrievals, laws, alphas, etas
    ):
        reads = method in ("rag", "sd", "rapid")
        common = {"context_budget": budget if reads else None, "retrieval": relation if reads else "related"}
        if method in ("lc", "rag"):
            made = Configuration(method)
        elif method == "rapid" and law != "exact":
            made = Configuration(method, eta, law, alpha, num_draft_tokens)
        else:
            made = Configuration(method, 0.0, "exact", None, num_draft_tokens)
        found[replace(made, seed=seed, **common)] = None  # type: ignore[arg-type]
    return list(found)
