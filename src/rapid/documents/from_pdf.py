"""The text layer of a PDF, by pypdf."""

from __future__ import annotations

import io

from rapid.documents.problem import problem
from rapid.documents.quiet import quiet
from rapid.documents.text import is_blank


def pdf_text(data: bytes, name: str) -> str:
    """The text of all pages, an empty line between two of them.

    Raises:
        DocumentError: encrypted with a password, damaged, or without text (scanned pages).
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        with quiet("pypdf"):
            reader = PdfReader(io.BytesIO(data))
            # Many files are encrypted only to forbid printing: the empty password opens them.
            if reader.is_encrypted and not reader.decrypt(""):
                raise FileNotDecryptedError
            text = "\n\n".join(page.extract_text() for page in reader.pages)
    except (DependencyError, FileNotDecryptedError):
        # The dependency is a package for AES, which pypdf needs even where the password is empty.
        raise problem(name, "is encrypted; remove the password first, e.g. qpdf --decrypt IN.pdf OUT.pdf") from None
    except Exception as error:  # a malformed file makes pypdf raise nearly anything
        raise problem(name, f"is damaged ({_one_line(error)}); repair it first, e.g. qpdf IN.pdf OUT.pdf") from error
    if is_blank(text):
        raise problem(name, "has no text layer; run OCR first, e.g. ocrmypdf IN.pdf OUT.pdf")
    return text


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return "".join(filter(str.isprintable, words))[:100] or type(error).__name__
