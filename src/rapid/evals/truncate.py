"""Middle cuts: what is too long loses its middle, to the token.

`middle_cut` is the benchmarks' cut of a rendered prompt. `cut_context` makes the same cut, but never into the
question, the choices or the markers around the document, which a small window would otherwise lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rapid.errors import InvalidParameter, PromptTooLong


def middle_cut(token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """At most `max_tokens` ids: the first `max_tokens // 2` and the last of them that complete the number.

    This is `ids[:L // 2] + ids[-L // 2:]` of LongBench v2 and InfiniteBench: Python reads the latter as
    `(-L) // 2`, so exactly L ids stay for odd L too.
    """
    if max_tokens < 1:
        raise InvalidParameter(f"max_tokens must be at least 1, got {max_tokens}")
    if len(token_ids) <= max_tokens:
        return list(token_ids)
    return [*token_ids[: max_tokens // 2], *token_ids[-max_tokens // 2 :]]


def context_halves(context: int, before: int, after: int, max_tokens: int) -> tuple[int, int] | None:
    """How many tokens of the document to keep at its start and its end; None keeps all.

    Where both halves of the prompt hold more than `before` and `after`, they are those of `middle_cut` on the
    whole prompt; otherwise the shorter half takes what the other one lacks. All counts are tokens.
    Raises `PromptTooLong` when nothing of the document would remain.
    """
    if before + context + after <= max_tokens:
        return None
    room = max_tokens - before - after
    if room < 1:
        raise PromptTooLong(f"the question alone needs {before + after} tokens of {max_tokens}; use a larger window")
    head = min(max(max_tokens // 2 - before, 0), room)
    return head, room - head


def cut_context(context_ids: Sequence[int], before: int, after: int, max_tokens: int) -> list[int]:
    """The document's ids, cut so that `before` + ids + `after` is at most `max_tokens`."""
    halves = context_halves(len(context_ids), before, after, max_tokens)
    if halves is None:
        return list(context_ids)
    head, tail = halves
    return [*context_ids[:head], *context_ids[len(context_ids) - tail :]]


def cut_text(
    context: str,
    before: int,
    after: int,
    max_tokens: int,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    count_prompt: Callable[[str], int] | None = None,
) -> str:
    """`cut_context` for text. Raises `PromptTooLong` when nothing of the document would remain.

    count_prompt  tokens of the whole prompt around a given context, chat template included; without it, those of
                  its parts. Text that is cut or joined may read as other tokens than its parts: what exceeds
                  `max_tokens` by this count is cut as well, so the prompt always fits.
    """

    def count(text: str) -> int:
        return before + len(encode(text)) + after if count_prompt is None else count_prompt(text)

    excess = count(context) - max_tokens
    if excess <= 0:
        return context
    ids = encode(context)
    halves = context_halves(len(ids), before, after, max_tokens)
    head, tail = halves if halves is not None else (len(ids) // 2, len(ids) - len(ids) // 2)
    if halves is None:  # too long by what joining the parts adds
        tail -= min(tail, excess)
    while head + tail > 0:
        # A cut inside a character's bytes decodes to replacement characters at the seam.
        start = decode(ids[:head]).rstrip("\ufffd")
        end = decode(ids[len(ids) - tail :]).lstrip("\ufffd")
        excess = count(start + end) - max_tokens
        if excess <= 0:
            return start + end
        from_head = min(head, excess - excess // 2)
        head -= from_head
        tail -= min(tail, excess - from_head)
    raise PromptTooLong(f"no part of the document fits into {max_tokens} tokens; use a larger window")
