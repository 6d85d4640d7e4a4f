"""Which format some bytes are in: by their content first, by the file's ending where content cannot tell."""

from __future__ import annotations

import re
from typing import Literal

from rapid.documents.problem import SUPPORTED, problem
from rapid.errors import DocumentError

Format = Literal["text", "html", "pdf", "docx"]

HTML_ENDINGS = frozenset({".html", ".htm", ".xhtml"})
TEXT_ENDINGS = frozenset({".txt", ".text", ".md", ".markdown"})
_OTHER_FORMATS = {
    ".doc": "an old Word file",
    ".docm": "a Word file with macros",
    ".odt": "an OpenDocument text",
    ".rtf": "a rich text file",
    ".pages": "a Pages file",
    **dict.fromkeys((".xls", ".xlsx", ".xlsm", ".ods", ".numbers"), "a spreadsheet"),
    **dict.fromkeys((".ppt", ".pptx", ".odp", ".key"), "a presentation"),
    **dict.fromkeys((".epub", ".mobi", ".azw3"), "an e-book"),
    **dict.fromkeys((".ps", ".djvu"), "a page description"),
}
# First bytes of what is no text, to say what it is rather than just "binary".
_SIGNATURES = (
    (b"\xd0\xcf\x11\xe0", "an old or a password-protected Office file"),
    (b"{\\rtf", "a rich text file"),
    (b"%!PS-", "a PostScript file"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!\x1a", "a RAR archive"),
    (b"\x7fELF", "an executable"),
    (b"SQLite format 3\0", "an SQLite database"),
)
_PDF = re.compile(rb"\s*%PDF-\d")
_HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)\b", re.I | re.S)


def format_of(data: bytes, ending: str, name: str) -> Format:
    """The format of a non-empty document; `ending` is that of its file (".md"), or "".

    Raises:
        DocumentError: a format that is not read, or a content that is not what the ending says.
    """
    ending = ending.lower()
    if ending in _OTHER_FORMATS:
        raise _unsupported(name, _OTHER_FORMATS[ending])
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            raise _unsupported(name, kind)
    # A few bytes may precede the header (ISO 32000-1, implementation note 13).
    if _PDF.match(data) or (ending == ".pdf" and b"%PDF-" in data[:1024]):
        return "pdf"
    if data.startswith(b"PK\x03\x04"):
        return "docx"
    if ending in (".pdf", ".docx"):
        raise problem(name, f"is damaged: it holds no {ending[1:]}; save or download it again")
    if ending in HTML_ENDINGS:
        return "html"
    # Zeros are taken out so that UTF-16 is recognised too.
    if ending not in TEXT_ENDINGS and _HTML.match(data[:4096].replace(b"\0", b"").lstrip(b"\xef\xbb\xbf\xff\xfe")):
        return "html"
    return "text"


def _unsupported(name: str, kind: str) -> DocumentError:
    return problem(name, f"is {kind}, which is not supported; convert it to one of {SUPPORTED}")
