"""Documents: a file, standard input or a text in, a `Document` out.

Floor 1: knows no model and no retrieval, and never fetches anything. Importing this package loads no parser;
each is loaded on the first document of its kind.

What is read       txt, md and any other plain text, html, pdf (its text layer), docx (body text and tables).
What is changed    the encoding becomes Unicode, line ends become "\\n", NULs and leading byte order marks go,
                   lone surrogates become U+FFFD. Nothing else: offsets refer to the `text` that results.
What is refused    with one line, a `DocumentError`: whatever is missing, empty or blank, damaged, encrypted,
                   binary, of another format, or too large: `MAX_BYTES`, and less for html and docx (unpacked).
"""

from rapid.documents.reading import MAX_BYTES, Source, document_from_text, read_document, read_documents

__all__ = ["MAX_BYTES", "Source", "document_from_text", "read_document", "read_documents"]
