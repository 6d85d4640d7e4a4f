"""Saved sessions: what a file holds of one, and what it must agree with to be used again.

The documents are in the file, so that it can be asked without them; so are the target's keys and values over them,
which is what takes long to make. The cut of a document too long for the window is not: it follows from the documents,
the reserve and the window, and the tokens in the file prove that it came out the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rapid import __version__, sealed
from rapid.backends.base import CacheState, Reader
from rapid.errors import InvalidParameter, SessionError
from rapid.params import Retrieval
from rapid.prompt import Template
from rapid.types import Document

# To be raised whenever a file of an older version would be misread.
FORMAT = 1
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class SavedSession:
    """`model` and `dtype` are the reader's that wrote `state`; the rest is what `Engine.open` was given."""

    model: str
    dtype: str
    documents: list[Document]
    retrieval: Retrieval
    template: Template
    reserve_tokens: int
    state: CacheState

    def require_fit(self, path: Path, reader: Reader, documents: Sequence[Document] | None) -> None:
        """Raise `SessionError` unless the session was saved by the model of `reader`, about `documents` (if given)."""
        if self.dtype != reader.dtype:
            raise SessionError(
                f"session {path} was saved with dtype {self.dtype} and the model is loaded with {reader.dtype}; "
                f"load it with {self.dtype}, or save the session again"
            )
        if self.model != reader.fingerprint:
            raise SessionError(
                f"session {path} was saved with another model; load that one, or open the documents with this one"
            )
        if documents is not None and [d.text for d in documents] != [d.text for d in self.documents]:
            raise SessionError(
                f"session {path} is about other documents than those given (or they have changed since); "
                "leave them out to ask about the saved ones, or save the session again"
            )


def save(path: Path, saved: SavedSession, dtype: str | None = None) -> None:
    """Write a session, atomically. `dtype` None keeps the cache exactly; float16 makes the file half as large.

    Raises `SessionError` where it cannot be written.
    """
    import torch

    if dtype is not None and dtype not in DTYPES:
        raise InvalidParameter(f"dtype of a saved session must be one of {', '.join(DTYPES)}, got {dtype!r}")
    sealed.check_destination(path)
    header = {
        "format": FORMAT,
        "rapid": __version__,
        "model": saved.model,
        "dtype": saved.dtype,
        "documents": [{"name": d.name, "sha256": _sha256(d.text.encode())} for d in saved.documents],
        "retrieval": asdict(saved.retrieval),
        "template": asdict(saved.template),
        "reserve_tokens": saved.reserve_tokens,
    }
    tensors = {"token_ids": torch.tensor(saved.state.token_ids, dtype=torch.int64), **saved.state.tensors}
    for number, document in enumerate(saved.documents):
        tensors[_document(number)] = torch.frombuffer(bytearray(document.text.encode()), dtype=torch.uint8)
    sealed.write(path, header, tensors, getattr(torch, dtype) if dtype else None)


@contextmanager
def reading(path: Path) -> Iterator[SavedSession]:
    """A saved session whose every byte is as it was written; its tensors are read from the file when asked for.

    Raises `SessionError` for another format, damage, or a file that is no saved session.
    """
    with sealed.reading(path) as file:
        if (version := file.header.get("format")) != FORMAT:
            raise SessionError(
                f"session {path} has format {version!r} (rapid {file.header.get('rapid')}), this rapid "
                f"({__version__}) reads format {FORMAT}; save it again"
            )
        file.verify()
        try:
            saved = _parsed(file)
        # A file that was made to mislead can hold anything under any name.
        except (KeyError, TypeError, ValueError) as error:
            raise sealed.damaged(path) from error
        yield saved


def _parsed(file: sealed.Sealed) -> SavedSession:
    header = file.header
    documents = []
    for number, described in enumerate(header["documents"]):
        data = file.tensors[_document(number)].numpy().tobytes()
        if _sha256(data) != described["sha256"]:
            raise ValueError("a document's hash")
        documents.append(Document(data.decode(), _typed(described["name"], str)))
    template: dict[str, Any] = _typed(header["template"], dict)
    if not all(words is None or isinstance(words, str) for words in template.values()):
        raise TypeError("a template's words")
    token_ids = file.tensors["token_ids"]
    if token_ids.ndim != 1 or token_ids.is_floating_point():
        raise ValueError("token ids")
    return SavedSession(
        model=_typed(header["model"], str),
        dtype=_typed(header["dtype"], str),
        documents=documents,
        retrieval=Retrieval(**header["retrieval"]),
        template=Template(**template),
        reserve_tokens=_typed(header["reserve_tokens"], int),
        state=CacheState(token_ids.tolist(), file.tensors),
    )


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _document(number: int) -> str:
    return f"documents.{number}"
