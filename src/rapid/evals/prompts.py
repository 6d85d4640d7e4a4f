"""Prompts in three parts, so that one document is read once for all of its questions.

A benchmark's template is split where the document stands: `before` holds nothing that depends on the question
(RULER's worked example apart), `after` holds the question. Substitution is a single pass over the template
alone (`string.Template`): whatever a document, question or choice contains stays text. The originals chain
`str.replace`, which fills in a `$Q$` that stands inside the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

# What the released code changes in the long template to get the drafter's (paper, section 3.1).
LONG_WORDS = "the following text"
RETRIEVED_WORDS = "the following retrieved text chunks"


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: one user message `before + context + after`, and what surrounds it.

    system         the system message; None sends none.
    answer_prefix  text that the answer continues, placed after the chat template's assistant header.
    """

    before: str
    context: str
    after: str
    system: str | None = None
    answer_prefix: str = ""

    @property
    def text(self) -> str:
        """The user message."""
        return self.before + self.context + self.after


@dataclass(frozen=True)
class PromptTemplate:
    """A benchmark's prompt with `$name` placeholders in all parts but the document's."""

    before: str
    after: str
    system: str | None = None
    answer_prefix: str = ""

    def render(self, context: str, values: Mapping[str, str], *, retrieved: bool = False) -> Prompt:
        """Fill in the placeholders once. `retrieved` says so where the template names the text."""
        before = self.before.replace(LONG_WORDS, RETRIEVED_WORDS) if retrieved else self.before
        return Prompt(
            before=Template(before).substitute(values),
            context=context,
            after=Template(self.after).substitute(values),
            system=self.system,
            answer_prefix=Template(self.answer_prefix).substitute(values),
        )
