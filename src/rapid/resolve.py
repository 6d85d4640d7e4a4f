"""What a `Speculation` means for the engine at hand: law, strength, drafters and draft length in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rapid.backends.base import Backend, DrafterName
from rapid.errors import VocabularyMismatch
from rapid.params import DRAFT_TOKENS_LOSSY, ETA_LARGER_DRAFTER, ETA_SELF, Speculation, drafter_bits
from rapid.sampling.verify import AcceptanceRule

_DRAFTERS: dict[str, tuple[DrafterName, ...]] = {
    "lc": (),
    "rag": (),
    "lookup": ("lookup",),
    "sd": ("model",),
    "rapid": ("model",),
    "sd-full": ("full",),
    "magicdec": ("streaming",),
}


@dataclass(frozen=True)
class Resolved:
    """`rule` holds law and eta. `drafters` is empty where nothing is drafted. `optional_model`: the model
    drafter is one way of several to be fast, and may be left out where it cannot pay. `warnings` say what of the
    engine's models or the settings comes out otherwise than one may think."""

    rule: AcceptanceRule
    drafters: tuple[DrafterName, ...]
    num_draft_tokens: int | Literal["auto"]
    optional_model: bool = False
    warnings: tuple[str, ...] = ()


def resolve(speculation: Speculation, backend: Backend) -> Resolved:
    """Fill in what was left open: eta by the kind of drafter, the draft length by whether the answer is lossless.

    Raises `VocabularyMismatch` where a transfer is asked for between two vocabularies.
    """
    eta = 0.0
    if speculation.method == "rapid" and speculation.law != "exact":
        larger = backend.drafter.num_parameters > backend.target.num_parameters
        default = ETA_LARGER_DRAFTER if larger else ETA_SELF
        eta = default if speculation.eta is None else float(speculation.eta)
    rule = AcceptanceRule(speculation.law if eta else "exact", eta, speculation.alpha)
    drafters = _DRAFTERS[speculation.method]
    num_draft_tokens = speculation.num_draft_tokens
    if not drafters or num_draft_tokens == 0:
        return Resolved(rule, (), 0)
    warnings = _warnings(speculation, rule, backend)
    if num_draft_tokens == "auto" and rule.transfers:
        num_draft_tokens = DRAFT_TOKENS_LOSSY
    if num_draft_tokens == "auto" and speculation.method == "rapid":
        return Resolved(rule, ("lookup", *drafters), "auto", optional_model=True, warnings=warnings)
    return Resolved(rule, drafters, num_draft_tokens, warnings=warnings)


def _warnings(speculation: Speculation, rule: AcceptanceRule, backend: Backend) -> tuple[str, ...]:
    """What to tell about the drafter at hand. Raises `VocabularyMismatch`."""
    name = backend.drafter.name
    if rule.transfers and (difference := backend.vocabulary_difference):
        raise VocabularyMismatch(
            f"eta {rule.eta:g} needs a drafter with the vocabulary of target {backend.target.name}, and {name} has "
            f"another: {difference}; use eta 0 (--lossless, or method sd) with it, or drafter self"
        )
    if speculation.method == "magicdec" and not backend.self_speculation:
        return (f"method magicdec drafts with the target's own weights: drafter {name} is not used",)
    if rule.transfers and drafter_bits(name):
        return (
            f"eta {rule.eta:g} moves the answer towards a quantised copy of the target, which nobody has judged by "
            "quality; use eta 0 (--lossless, or method sd) to have it draft only",
        )
    return ()
