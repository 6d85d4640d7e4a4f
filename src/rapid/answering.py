"""Rounds of token ids in, pieces of text and at last an `Answer` out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from rapid.backends.base import Generation
from rapid.decode.stop import StopRule
from rapid.textstream import TextStream
from rapid.types import Answer


class AnswerStream:
    """Iterate to get the text piece by piece; `finish` gives the `Answer`. Iterating once more goes on, not back."""

    def __init__(
        self, generation: Generation, stop: StopRule, text: TextStream, unfinished: Answer, asked: float
    ) -> None:
        self._generation = generation
        self._stop = stop
        self._text = text
        self._answer = unfinished
        self._asked = asked
        self._done = False

    @property
    def warnings(self) -> list[str]:
        """What the user should know before the first word: a cut document, an ignored setting."""
        return self._answer.warnings

    def __iter__(self) -> Iterator[str]:
        while not self._done:
            if piece := self._next_piece():
                yield piece

    def finish(self) -> Answer:
        """The finished answer; decodes what is left of it."""
        for _ in self:
            pass
        return self._answer

    def _next_piece(self) -> str:
        stats = self._answer.stats
        start = time.perf_counter()
        round_ = next(self._generation.rounds)
        now = time.perf_counter()
        stats.add(round_, now - start)
        if stats.rounds == 1:
            stats.ttft_s = now - self._asked
        if round_.finish_reason is None:
            return self._text.take()
        self._done = True
        piece = self._text.take() + self._text.finish()
        stats.governor = self._generation.explain()
        self._answer = replace(
            self._answer,
            text=self._text.text,
            token_ids=list(self._stop.emitted),
            finish_reason=round_.finish_reason,
        )
        return piece
