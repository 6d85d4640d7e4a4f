"""One template, two contexts: the target's prompt holds the document, the drafter's the retrieved passages.

The model's own chat template is used, and the result equals templating and tokenizing in one step. Text that comes
from outside (documents, questions, earlier turns) is tokenized as plain text: `<|im_end|>` in a document is ten
characters, not the end of a turn.

The document comes first and the question last, so that another question about the same document reuses its cache.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapid.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


@dataclass(frozen=True)
class Template:
    """The words around a context and a question. `what` names the context: whole text or retrieved passages.

    answer_prefix  words the answer continues, after the chat template's assistant header. None puts none there;
                   a model without a chat template is then prompted with "Answer:".
    """

    opening: str = "Please read the following {what} and answer the question below.\n\n<text>\n"
    middle: str = "\n</text>\n\n"
    closing: str = ""
    whole: str = "text"
    retrieved: str = "retrieved text chunks"
    system: str | None = None
    answer_prefix: str | None = None

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
        special = {token.content: token for token in added.values() if token.special and token.content}
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(longest_first) or r"(?!)")
        self._stand_ins = _add_stand_ins(self._plain, special)
        self._meant = {
            self._plain.token_to_id(self._stand_ins[t.content]): i for i, t in added.items() if t.content in special
        }

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
        outside: list[str] = []

        def mark(text: str) -> str:
            outside.append(text)
            return f"\ue000{len(outside) - 1}\ue001"

        messages = [{"role": "system", "content": mark(template.system)}] if template.system else []
        for turn, words in enumerate([*(q for q, _ in history), question]):
            if turn == 0:
                before = template.before(retrieved=retrieved) + mark(context) + template.middle
                content = before + mark(words) + template.closing
            else:
                content = mark(words)
            messages.append({"role": "user", "content": content})
            if turn < len(history):
                messages.append({"role": "assistant", "content": mark(history[turn][1])})
        rendered = self._render(messages, "\n\nAnswer:" if template.answer_prefix is None else "")
        if template.answer_prefix:
            rendered += mark(template.answer_prefix)
        return self._tokenize(rendered, outside)

    def cut_middle(self, text: str, num_tokens: int) -> tuple[int, int]:
        """Character positions (a, b) such that text[:a] + text[b:] holds the first and last halves of
        `num_tokens` tokens, as the paper truncates: ids[:n // 2] + ids[-(n - n // 2):]."""
        offsets = self._plain.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= num_tokens:
            return len(text), len(text)
        if num_tokens <= 0:
            return 0, len(text)
        head, tail = num_tokens // 2, num_tokens - num_tokens // 2
        # Where a character takes several tokens and the cut falls inside it, it goes.
        start = min(offsets[head - 1][1], offsets[head][0]) if head else 0
        return start, max(offsets[-tail][0], offsets[-tail - 1][1])

    def _render(self, messages: list[dict[str, str]], base_ending: str) -> str:
        """The messages as text that ends where the answer begins; `base_ending` is a base model's last words."""
        if self._hf.chat_template:
            from jinja2 import TemplateError

            try:
                return str(self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            except TemplateError as error:
                reason = " ".join(str(error).split())
                raise ModelError(f"the model's chat template refuses this conversation: {reason}") from error
        # A base model: plain text, with the begin token where its tokenizer would add one.
        begins = self._markup.encode("a").ids[:1] == [self._hf.bos_token_id]
        text = "\n\n".join(m["content"] for m in messages)
        return (self._hf.bos_token if begins else "") + text + base_ending

    def _tokenize(self, rendered: str, outside: list[str]) -> list[int]:
        parts = _MARK.split(rendered)  # literal, number, literal, number, ..., literal
        if [int(number) for number in parts[1::2]] != list(range(len(outside))):
            raise ModelError("the model's chat template drops, repeats or reorders messages; RAPID cannot use it")
        # Special tokens are text here, but for the stand-ins of those that the template itself wrote.
        text = "".join(
            outside[int(part)] if i % 2 else self._special_pattern.sub(lambda m: self._stand_ins[m.group()], part)
            for i, part in enumerate(parts)
        )
        return [self._meant.get(i, i) for i in self._plain.encode(text, add_special_tokens=False).ids]


def _add_stand_ins(tokenizer: Tokenizer, special: dict[str, AddedToken]) -> dict[str, str]:
    """Add a token that behaves like it for each special token; contents -> stand-ins.

    They hold a secret, so that no text can imitate them.
    """
    from tokenizers import AddedToken

    secret = secrets.token_hex(8)
    stand_ins = {content: f"\ue002{secret}{number}\ue003" for number, content in enumerate(special)}
    tokenizer.add_tokens(
        [
            AddedToken(
                stand_ins[content],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,  # a normalizer must not change the stand-in before it is found
                special=False,
            )
            for content, token in special.items()
        ]
    )
    return stand_ins


def _private_copy(tokenizer: Any, *, special_as_text: bool) -> Tokenizer:
    """A tokenizer of our own without truncation or padding: what others set on theirs cannot reach it."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = special_as_text
    return copy
