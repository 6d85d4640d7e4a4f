"""The text of an HTML page as a reader sees it, by Beautiful Soup over the standard library's parser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rapid.documents.problem import problem
from rapid.documents.quiet import quiet
from rapid.documents.text import clean, decode

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

# The parsed tree takes some 50 times the memory of its markup.
MAX_MARKUP_BYTES = 32 * 2**20

_UNSEEN = frozenset({"script", "style", "noscript", "template", "iframe", "object", "svg", "datalist"})
_LINE = frozenset(
    {"address", "caption", "center", "dd", "div", "dt", "figcaption", "legend", "li", "option", "summary"}
    | {"tbody", "tfoot", "thead"}
)
_PARAGRAPH = frozenset(
    {"article", "aside", "blockquote", "body", "details", "dl", "fieldset", "figure", "footer", "form"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "main", "nav", "ol", "p", "pre"}
    | {"section", "table", "title", "ul"}
)
_CELL = frozenset({"td", "th"})
_PRE = frozenset({"pre", "textarea", "listing"})
_SPACE = re.compile(r"[ \t\n\r\f]+")


def html_text(data: bytes, name: str) -> str:
    """The title and the visible text: blocks end lines, ` | ` stands between cells, <pre> keeps its spaces.

    Raises:
        DocumentError: the markup cannot be parsed, or is larger than `MAX_MARKUP_BYTES`.
        ValueError: the bytes are no text.
    """
    if len(data) > MAX_MARKUP_BYTES:
        limit = MAX_MARKUP_BYTES // 2**20
        raise problem(name, f"is HTML of more than {limit} MiB; save its text as a txt file and give that")

    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector
    from bs4.exceptions import ParserRejectedMarkup

    with quiet():
        markup = clean(decode(data, EncodingDetector.find_declared_encoding(data, is_html=True)))
        try:
            soup = BeautifulSoup(markup, "html.parser")
        except (ParserRejectedMarkup, RecursionError) as error:
            raise problem(name, "is malformed HTML; save the page again, or its text as txt") from error
        return _visible_text(soup)


def _visible_text(soup: BeautifulSoup) -> str:
    from bs4.element import CData, NavigableString, Tag

    for block in soup.find_all(list(_PRE)):
        # A line end right after the tag is not part of the text (HTML standard, 13.1.2.5).
        if block.contents and type(first := block.contents[0]) is NavigableString and first.startswith("\n"):
            first.replace_with(first[1:])

    page = _Page()
    # A stack and not recursion: real pages nest deeper than Python's limit. A Tag seen for the second time is
    # one whose content is done.
    stack: list[tuple[Any, bool, bool]] = [(soup, False, False)]
    while stack:
        node, preformatted, done = stack.pop()
        if not isinstance(node, Tag):
            if type(node) in (NavigableString, CData):
                if preformatted:
                    page.write_preformatted(str(node))
                else:
                    page.write(str(node))
        elif done:
            page.close(node.name)
        elif node.name == "br":
            page.line_break()
        elif node.name not in _UNSEEN:
            page.open(node.name)
            stack.append((node, preformatted, True))
            inner = preformatted or node.name in _PRE
            stack.extend((child, inner, False) for child in reversed(node.contents))
    return "".join(page.pieces)


class _Page:
    """Text as it is laid out; the space between two pieces is settled when the second one is known."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._newlines = 0
        self._cells = 0
        self._space = False
        self._row_started = False

    def open(self, tag: str) -> None:
        if tag == "tr":
            self._end_row()
        elif tag in _CELL:
            self._next_cell()
        else:
            self._block(tag)

    def close(self, tag: str) -> None:
        if tag == "tr":
            self._end_row()
        elif tag not in _CELL:
            self._block(tag)

    def line_break(self) -> None:
        self._newlines = min(self._newlines + 1, 2)

    def write(self, text: str) -> None:
        """Text whose runs of white space count as one space."""
        words = _SPACE.sub(" ", text)
        self._space |= words.startswith(" ")
        if words.strip(" "):
            self._put(words.strip(" "))
            self._space = words.endswith(" ")

    def write_preformatted(self, text: str) -> None:
        """Text whose white space stays; line ends at its end wait for what follows."""
        lines = text.rstrip("\n")
        if lines:
            self._put(lines)
        self._newlines += len(text) - len(lines)

    def _put(self, text: str) -> None:
        self._separate()
        self.pieces.append(text)
        self._row_started = True

    def _block(self, tag: str) -> None:
        if tag in _PARAGRAPH:
            self._newlines = max(self._newlines, 2)
        elif tag in _LINE:
            self._newlines = max(self._newlines, 1)

    def _end_row(self) -> None:
        self._newlines = max(self._newlines, 1)
        self._cells = -1
        self._row_started = False

    def _next_cell(self) -> None:
        self._cells += 1

    def _separate(self) -> None:
        bars = " | " * max(self._cells, 0)
        if not self.pieces:
            between = bars.lstrip()
        elif bars and self._row_started:
            # Paragraphs inside cells do not tear their row apart.
            between = bars
        elif self._newlines:
            between = "\n" * self._newlines + bars.lstrip()
        else:
            between = bars or " " * self._space
        self.pieces.append(between)
        self._newlines = self._cells = 0
        self._space = False
