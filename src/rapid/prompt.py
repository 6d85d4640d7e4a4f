"""One template, two contexts: the target's prompt holds the document, the drafter's the retrieved passages.

The model's own chat template is used, and the result equals templating and tokenizing in one step. Text that comes
from outside (documents, questions, earlier turns) is tokenized as plain text: `<|im_end|>` in a document is ten
characters, not the end of a turn.

The document comes first and the question last, so that another question about the same document reuses its cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapid.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Template:
    """The words around a context and a question. `what` names the context: whole text or retrieved passages."""

    opening: str = "Please read the following {what} and answer the question below.\n\n<text>\n"
    middle: str = "\n</text>\n\n"
    closing: str = ""
    whole: str = "text"
    retrieved: str = "retrieved text chunks"
    system: str | None = None

    def before(self, *, retrieved: bool) -> str:
        """The words before the context."""
        return self.opening.replace("{what}", self.retrieved if retrieved else self.whole)


DEFAULT_TEMPLATE = Template()

# Stand-ins for outside text while the chat template is rendered: private-use characters around a number, which
# no template transforms. Outside text itself is never rendered, so it cannot imitate them.
_MARK = re.compile("\ue000([0-9]+)\ue001")


class Prompter:
    """Renders and tokenizes prompts for one tokenizer (a transformers fast tokenizer). Safe to share by threads:
    it works on private copies of the tokenizer, whose state never changes."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError("the model has no fast tokenizer (tokenizer.json); convert it with transformers first")
        self._hf = tokenizer
        self._markup = _private_copy(tokenizer, special_as_text=False)
        self._plain = _private_copy(tokenizer, special_as_text=True)
        added = tokenizer.added_tokens_decoder
        self._special = {token.content: (i, token) for i, token in added.items() if token.special and token.content}
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(longest_first)) if longest_first else None

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of outside text; special tokens in it are plain text."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        """Tokens of outside text."""
        return len(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._markup.decode(list(token_ids), skip_special_tokens=True))

    def encode(
        self,
        context: str,
        question: str,
        *,
        retrieved: bool,
        history: Sequence[tuple[str, str]] = (),
        template: Template = DEFAULT_TEMPLATE,
    ) -> list[int]:
        """Prompt ids. `history` holds earlier (question, answer) turns of the same conversation."""
        outside = [context]

        def mark(text: str) -> str:
            outside.append(text)
            return f"\ue000{len(outside) - 1}\ue001"

        questions = [*(q for q, _ in history), question]
        answers = [a for _, a in history]
        messages = [{"role": "system", "content": template.system}] if template.system else []
        for turn, text in enumerate(questions):
            words = mark(text)
            if turn == 0:
                opening = template.before(retrieved=retrieved)
                words = f"{opening}\ue0000\ue001{template.middle}{words}{template.closing}"
            messages.append({"role": "user", "content": words})
            if turn < len(answers):
                messages.append({"role": "assistant", "content": mark(answers[turn])})
        return self._tokenize(self._render(messages), outside)

    def cut_middle(self, text: str, num_tokens: int) -> tuple[int, int]:
        """Character positions (a, b) such that text[:a] + text[b:] holds the first and last halves of
        `num_tokens` tokens, as the paper truncates: ids[:n // 2] + ids[-(n - n // 2):]."""
        offsets = self._plain.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= num_tokens:
            return len(text), len(text)
        if num_tokens <= 0:
            return 0, len(text)
        head, tail = num_tokens // 2, num_tokens - num_tokens // 2
        return (offsets[head - 1][1] if head else 0), offsets[-tail][0]

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._hf.chat_template:
            return str(self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # A base model: plain text, with the begin token where its tokenizer would add one.
        begins = self._hf("a")["input_ids"][:1] == [self._hf.bos_token_id]
        text = "\n\n".join(m["content"] for m in messages)
        return (self._hf.bos_token if begins else "") + text + "\n\nAnswer:"

    def _tokenize(self, rendered: str, outside: list[str]) -> list[int]:
        parts = _MARK.split(rendered)  # literal, number, literal, number, ..., literal
        numbers = [int(n) for n in parts[1::2]]
        if numbers != sorted(numbers) or len(set(numbers)) != len(outside):
            raise ModelError("the model's chat template drops, repeats or reorders messages; RAPID cannot use it")
        if not any(self._special_pattern and self._special_pattern.search(text) for text in outside):
            whole = "".join(p if i % 2 == 0 else outside[int(p)] for i, p in enumerate(parts))
            return list(self._markup.encode(whole, add_special_tokens=False).ids)
        # Outside text imitates special tokens: only those the template itself wrote become ids.
        ids: list[int] = []
        run = ""
        for i, part in enumerate(parts):
            if i % 2:
                run += outside[int(part)]
                continue
            position = 0
            for match in self._special_pattern.finditer(part) if self._special_pattern else ():
                token_id, token = self._special[match.group()]
                before = run + part[position : match.start()]
                ids += self.encode_plain(before.rstrip() if token.lstrip else before)
                ids.append(token_id)
                run, position = "", match.end()
                if token.rstrip:
                    position += len(part) - position - len(part[position:].lstrip())
            run += part[position:]
        return ids + self.encode_plain(run)


def _private_copy(tokenizer: Any, *, special_as_text: bool) -> Tokenizer:
    """A tokenizer of our own without truncation or padding: what others set on theirs cannot reach it."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = special_as_text
    return copy
