"""Sources to documents: paths, standard input, texts. Imports no parser; `rapid.documents` has the rules."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath

from rapid.documents.formats import format_of
from rapid.documents.problem import SUPPORTED, problem
from rapid.documents.text import clean, decode, is_blank, without_surrogates
from rapid.errors import DocumentError
from rapid.types import Document

Source = str | os.PathLike[str] | Document

# Larger than any document a model can read, small enough to be held in memory several times over.
MAX_BYTES = 200 * 2**20
STDIN = "-"


def read_document(source: Source, *, name: str | None = None) -> Document:
    """Reads one document: a path, "-" for standard input, or a `Document`, which is passed through.

    A str is always a path; a text goes through `document_from_text`. `name` replaces the name that the
    document would have: the path as given, or `stdin`. A `Document` keeps its text, but for lone surrogates
    (one U+FFFD each, so offsets hold).

    Raises:
        DocumentError: the document is missing, empty, or cannot be read; the message says what to do.
    """
    if isinstance(source, Document):
        return _checked(source, name)
    if not isinstance(source, str | os.PathLike):
        raise DocumentError(
            f"a document is a path, '-' or a Document, got {type(source).__name__}; "
            "a text goes through document_from_text"
        )
    if source == STDIN:
        shown = name or "stdin"
        return _parsed(_read_stdin(shown), "", shown)
    path = os.fsdecode(source)
    data = _read_file(path)
    return _parsed(data, PurePath(path).suffix, path if name is None else name, path)


def read_documents(sources: Source | Iterable[Source]) -> list[Document]:
    """Reads several documents, in their order; one source alone is a list of one.

    Raises:
        DocumentError: as `read_document`, or nothing was given, or standard input twice.
    """
    if isinstance(sources, str | os.PathLike | Document) or not isinstance(sources, Iterable):
        sources = [sources]
    sources = list(sources)
    if not sources:
        raise DocumentError("no document given; name at least one file, or '-' for standard input")
    if sum(source == STDIN for source in sources) > 1:
        raise DocumentError("stdin: '-' is given more than once, but standard input can be read only once")
    return [read_document(source) for source in sources]


def document_from_text(text: str, name: str = "document") -> Document:
    """A document of a text in memory, with line ends, NULs and surrogates treated as in a file.

    Raises:
        DocumentError: the text is blank, or no str.
    """
    if not isinstance(text, str):
        raise problem(name, f"text must be a str, got {type(text).__name__}; decode it first")
    return _document(clean(text), name, name)


def _parsed(data: bytes, ending: str, name: str, place: str | None = None) -> Document:
    """The document in `data`; errors name `place`, where it was read from."""
    place = name if place is None else place
    if not data.strip(b"\0"):
        raise _empty(place)
    form = format_of(data, ending, place)
    try:
        if form == "pdf":
            from rapid.documents.from_pdf import pdf_text

            text = pdf_text(data, place)
        elif form == "docx":
            from rapid.documents.from_docx import docx_text

            text = docx_text(data, place)
        elif form == "html":
            from rapid.documents.from_html import html_text

            text = html_text(data, place)
        else:
            text = decode(data)
    except ValueError as error:
        raise problem(
            place, f"is no readable text ({error}); give {SUPPORTED}, or convert the text to UTF-8"
        ) from error
    return _document(clean(text), name, place)


def _document(text: str, name: str, place: str) -> Document:
    if is_blank(text):
        raise _empty(place)
    return Document(text, clean(name))


def _checked(document: Document, name: str | None) -> Document:
    if is_blank(document.text):
        raise _empty(document.name)
    text = without_surrogates(document.text)
    name = document.name if name is None else clean(name)
    if (text, name) == (document.text, document.name):
        return document
    return replace(document, text=text, name=name)


def _empty(name: str) -> DocumentError:
    return problem(name, "is empty; give a document with text in it")


def _read_stdin(name: str) -> bytes:
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    except (AttributeError, OSError, ValueError) as error:
        raise problem(name, "standard input cannot be read; pipe a document into it, or name a file") from error
    _check_size(len(data), name)
    return data


def _read_file(path: str) -> bytes:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise problem(path, "is a directory; name the files in it")
        _check_size(status.st_size, path)
        with open(path, "rb") as file:
            # Pipes and devices have no size: the limit must hold while reading, too.
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise problem(path, "no such file; check the path") from None
    except PermissionError:
        raise problem(path, "no permission to read it; change its mode or copy it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise problem(path, f"cannot be read ({reason}); check the path") from error
    _check_size(len(data), path)
    return data


def _check_size(size: int, name: str) -> None:
    if size > MAX_BYTES:
        raise problem(name, f"is larger than {MAX_BYTES // 2**20} MiB; split it, or give the part that matters")
