"""From token ids to text that can be shown: whole characters only, stop strings left out.

Floor 1: it is given a decode function and knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"


class TextStream:
    """Collects tokens and hands out text as soon as it is final.

    A character whose bytes are spread over several tokens is held back until it is whole; one that is still
    unfinished when the answer ends is left out. Text that could be the beginning of a stop string is held back too.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # decoding starts here: enough for the decoder to join tokens properly
        self._read = 0  # ids before this are in `_text`
        self._text = ""
        self._shown = 0
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Add a token; True once a stop string is complete."""
        self._ids.append(token_id)
        self._append(self._fresh_text(), final=False)
        return self.stopped

    def take(self) -> str:
        """Text that has become final since the last call."""
        end = len(self._text) - (0 if self.stopped else self._held_back())
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def finish(self) -> str:
        """The rest of the text: nothing follows any more."""
        if not self.stopped:
            self._append(self._fresh_text().rstrip(_UNFINISHED), final=True)
        piece = self._text[self._shown :]
        self._shown = len(self._text)
        return piece

    @property
    def text(self) -> str:
        """All text so far, shown or held back."""
        return self._text

    def _fresh_text(self) -> str:
        before = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _append(self, fresh: str, *, final: bool) -> None:
        if not fresh or (fresh.endswith(_UNFINISHED) and not final):
            return
        self._context, self._read = self._read, len(self._ids)
        longest = max(map(len, self._stop), default=0)
        search_from = max(0, len(self._text) - longest)
        self._text += fresh
        found = [at for s in self._stop if (at := self._text.find(s, search_from)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self._stop):
                return length
        return 0
