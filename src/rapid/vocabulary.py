"""The text side of tokens: whether two tokenizers agree, and how a text continues tokens that are fixed already.

Floor 1: knows tokenizers, no model and no prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

# What a decoder writes for bytes that are no character, such as the first ones of a longer character.
_REPLACEMENT = "\ufffd"


def first_difference(target_tokenizer: Any, draft_tokenizer: Any) -> str | None:
    """The first id to which two transformers tokenizers give different tokens, in words; None where they agree.

    Contents are compared, not sizes: heads padded to different widths over one tokenizer are the same vocabulary.
    """
    if target_tokenizer is draft_tokenizer:
        return None
    ours = {i: token for token, i in target_tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in draft_tokenizer.get_vocab().items()}
    for token_id in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(token_id), theirs.get(token_id)
        if mine != other:
            return f"token {token_id} is {mine!r} for the target and {other!r} for the drafter"
    return None


class Vocabulary:
    """Text to tokens and back for one tokenizer (a transformers fast tokenizer). Safe to share by threads.

    Special tokens never come from text, and leave no text: `special_ids` are what a draft must not carry over.
    size  rows of the model's head: ids from there on are the tokenizer's alone.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        from tokenizers import Tokenizer

        self.size = size
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.special_ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` by itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; bytes of an unfinished character come out as U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def whole_characters(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without a character at its end that is not finished."""
        return self.decode(token_ids).rstrip(_REPLACEMENT)

    def continuation(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Tokens that, after `token_ids`, go on with `text`, which begins after their `whole_characters`.

        Both are tokenized as one text. Where a token would join the two sides, the part of it that belongs to `text`
        is tokenized by itself. Empty where `text` cannot follow: it does not fit an unfinished character, or this
        tokenizer has no way to write it.
        """
        before = self.whole_characters(token_ids)
        encoding = self._tokenizer.encode(before + text, add_special_tokens=False)
        if encoding.ids[: len(token_ids)] == list(token_ids):
            return self._known(encoding.ids[len(token_ids) :])
        if before != self.decode(token_ids):
            return []
        seam = len(before)
        first = next((i for i, (start, _) in enumerate(encoding.offsets) if start >= seam), len(encoding.ids))
        reached = max(seam, encoding.offsets[first - 1][1]) if first else seam
        part = text[: reached - seam]
        for pieces in (self.encode(part), self._pieces(part)):
            follows = [*pieces, *encoding.ids[first:]]
            if self.decode([*token_ids, *follows]) == before + text:
                return self._known(follows)
        return []

    def _pieces(self, text: str) -> list[int]:
        """Tokens that are parts of `text`, the longest first: for tokenizers that put a word boundary in front of
        whatever they encode."""
        pieces: list[int] = []
        while text:
            found = ((end, self._tokenizer.token_to_id(text[:end])) for end in range(len(text), 0, -1))
            known = ((end, token) for end, token in found if token is not None and token not in self.special_ids)
            end, token = next(known, (0, None))
            if token is None:
                return []
            pieces.append(token)
            text = text[end:]
        return pieces

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """The beginning of `token_ids` that the model has rows for."""
        return list(takewhile(lambda token_id: token_id < self.size, token_ids))
