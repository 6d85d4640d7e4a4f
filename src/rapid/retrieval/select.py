"""Which passages the drafter reads: the best ones within a budget, back in document order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rapid.types import Chunk, ScoredChunk

# The paper's constants: passages of 512 tokens, at least 4,096 tokens retrieved, or 1/24 of the context.
_PASSAGE = 512
_LEAST = 4096
_SHARE = 24
# 4,096 tokens are an eighth of a 32K window; smaller windows keep the eighth.
_LEAST_SHARE = 8


def context_budget(context_tokens: int, window: int) -> int:
    """Tokens to retrieve for a context of L = `context_tokens` read by a target of `window` tokens.

    The paper's rule (§3.1) is k = ceil(max(L / (512·24), min(4096 / 512, L / 512))) passages of 512 tokens;
    this is 512·k. Its lower bound of 4,096 is an eighth of the window where the window is below 32K (1,024
    tokens at 8K), so that the drafter's prompt stays much shorter than the target's.
    """
    length = min(context_tokens, window)
    least = min(_LEAST, max(1, window // _LEAST_SHARE))
    passage = min(_PASSAGE, least)
    return passage * math.ceil(max(length / (passage * _SHARE), min(least, length) / passage, 1))


def select(
    scores: npt.NDArray[np.float32],
    token_counts: Sequence[int],
    budget_tokens: int,
    eligible: npt.NDArray[np.bool_] | None = None,
) -> tuple[list[int], bool]:
    """Numbers of the passages to read, ascending, and whether they are only a fallback.

    `scores` [n], `token_counts` [n] in document order. Taken is the longest prefix of the ranking whose tokens
    fit `budget_tokens`; equal scores rank in document order. Passages that are not `eligible` [n] are left
    out. The best passage is taken whatever its length; where none is eligible it is the fallback, since an
    empty context would leave the drafter with nothing.
    """
    ranking = [int(i) for i in np.argsort(-scores, kind="stable")]
    allowed = [i for i in ranking if eligible is None or eligible[i]]
    if not allowed:
        return ranking[:1], True
    chosen = allowed[:1]
    used = token_counts[allowed[0]]
    for i in allowed[1:]:
        used += token_counts[i]
        if used > budget_tokens:
            break
        chosen.append(i)
    return sorted(chosen), False


def join_chunks(chunks: Sequence[Chunk | ScoredChunk]) -> str:
    """The texts of `chunks`, a blank line between them, in document order whatever order they come in."""
    passages = [c.chunk if isinstance(c, ScoredChunk) else c for c in chunks]
    return "\n\n".join(c.text for c in sorted(passages, key=lambda c: (c.document, c.start)))
