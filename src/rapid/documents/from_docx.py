"""The body of a Word document: paragraphs and tables in their order.

python-docx opens the package; its XML is walked here, because `Paragraph.text` passes over content controls,
tracked insertions, formulas and text boxes. Headers, footers, footnotes and comments are not read.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any

from rapid.documents.problem import SUPPORTED, problem
from rapid.documents.quiet import quiet

# Unpacked size of all parts: a small archive may swell to any size.
MAX_UNPACKED_BYTES = 256 * 2**20

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_PARAGRAPH, _TABLE, _ROW, _CELL = f"{_W}p", f"{_W}tbl", f"{_W}tr", f"{_W}tc"
_TEXT = {f"{_W}t", "{http://schemas.openxmlformats.org/officeDocument/2006/math}t"}
_MARKS = {
    f"{_W}tab": "\t",
    f"{_W}ptab": "\t",
    f"{_W}br": "\n",
    f"{_W}cr": "\n",
    f"{_W}noBreakHyphen": "-",
}
_SKIPPED = {
    # Properties hold tab stops, which share their tag with tab characters.
    *(f"{_W}pPr", f"{_W}rPr", f"{_W}sdtPr"),
    # Text that was deleted or moved away, as far as the author's changes are tracked.
    *(f"{_W}del", f"{_W}moveFrom"),
    # The second form of a text box, for programs that cannot show the first.
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",
}


def docx_text(data: bytes, name: str) -> str:
    """The text of the body: an empty line between paragraphs, a line a table row, ` | ` between cells.

    Raises:
        DocumentError: damaged, another kind of zip archive, or larger than `MAX_UNPACKED_BYTES` unpacked.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = archive.infolist()
    except Exception as error:  # beside BadZipFile also NotImplementedError, struct.error and others
        raise problem(name, "is a damaged docx or zip archive; save or download it again") from error
    if not any(part.filename.startswith("word/") for part in parts):
        raise problem(name, f"is a zip archive but no docx; give a document in one of {SUPPORTED}")
    # zipfile never unpacks more of a part than its entry states, so the statement may be trusted.
    if sum(part.file_size for part in parts) > MAX_UNPACKED_BYTES:
        limit = MAX_UNPACKED_BYTES // 2**20
        raise problem(name, f"unpacks to more than {limit} MiB; save its text as a txt file and give that")

    from docx import Document

    try:
        with quiet():
            body = Document(io.BytesIO(data)).element.body
            return "\n\n".join(_blocks(body))
    except Exception as error:  # a malformed file makes python-docx and lxml raise nearly anything
        raise problem(name, "is a damaged docx; open it in a word processor and save it again") from error


def _blocks(parent: Any) -> Iterator[str]:
    """The paragraphs and tables below `parent` (lxml elements) that are not blank."""
    for child in parent:
        if child.tag == _PARAGRAPH:
            text = _inline(child)
        elif child.tag == _TABLE:
            text = "\n".join(row for row in _rows(child) if row)
        elif child.tag in _SKIPPED:
            continue
        else:
            yield from _blocks(child)
            continue
        if text.strip():
            yield text


def _rows(table: Any) -> Iterator[str]:
    for row in _nearest(table, _ROW):
        cells = [" ".join(" ".join(_blocks(cell)).split()) for cell in _nearest(row, _CELL)]
        yield " | ".join(cells) if any(cells) else ""


def _nearest(parent: Any, tag: str) -> Iterator[Any]:
    """Elements with this tag below `parent`, not those inside another such one (a nested table's)."""
    for child in parent:
        if child.tag == tag:
            yield child
        elif child.tag not in _SKIPPED:
            yield from _nearest(child, tag)


def _inline(parent: Any) -> str:
    pieces = []
    for child in parent:
        if child.tag in _TEXT:
            pieces.append(child.text or "")
        elif child.tag in _MARKS:
            pieces.append(_MARKS[child.tag])
        elif child.tag == _PARAGRAPH:  # in a text box
            pieces.append(f"\n{_inline(child)}\n")
        elif child.tag not in _SKIPPED:
            pieces.append(_inline(child))
    return "".join(pieces)
