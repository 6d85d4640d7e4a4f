"""The engine: loaded models, from which documents are opened as sessions.

engine = rapid.Engine.load(target="embedded", drafter="self")
session = engine.open("report.pdf")
answer = session.ask("What was the revenue?")
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rapid.backends.base import Backend
from rapid.backends.registry import load_backend
from rapid.documents import Source, read_documents
from rapid.params import Models, Retrieval, Speculation
from rapid.parking import SessionMemory
from rapid.prompt import DEFAULT_TEMPLATE, Prompter, Template
from rapid.resolve import Resolved, resolve
from rapid.session import Session

if TYPE_CHECKING:
    from rapid.retrieval.embed import Embedder
    from rapid.types import StageProgress

# Room an opened document leaves for a question and its answer when the caller does not say how much.
DEFAULT_RESERVE = 1024


class Engine:
    """Loaded models. Make one with `Engine.load`, open documents with `Engine.open`."""

    def __init__(self, backend: Backend, load_s: float = 0.0, *, max_session_bytes: int | None = None) -> None:
        self.backend = backend
        self.memory = SessionMemory(max_session_bytes)
        self._load_s = load_s
        self._embedders: dict[str, Embedder] = {}
        self.target_prompter = Prompter(backend.target.tokenizer)
        self.draft_prompter = self.target_prompter if backend.self_speculation else Prompter(backend.drafter.tokenizer)

    @classmethod
    def load(
        cls,
        target: str = "embedded",
        drafter: str = "self",
        *,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        backend: str = "local",
        drafter_device: str | None = None,
        drafter_dtype: str | None = None,
        max_session_bytes: int | None = None,
        progress: StageProgress | None = None,
    ) -> Engine:
        """Load a target and a drafter.

        target   `embedded`, a hub id, a local directory, or a .gguf file.
        drafter  `self` (the target's own weights, one copy in memory), `self:8bit` or `self:4bit` (a smaller,
                 quantised copy beside it), or any of the above, of any size and with any tokenizer.
        threads  CPU threads; None leaves PyTorch's setting alone.
        drafter_device, drafter_dtype  where a drafter with weights of its own runs, and in what; None: as the target.
        max_session_bytes  memory for the caches of all open sessions: the least recently used go to disk, and
                           come back when they are asked again; None keeps all in memory.
        Raises `ModelError` where a model cannot be found, read or used.
        """
        start = time.perf_counter()
        settings = Models(target, drafter, device, dtype, threads, drafter_device, drafter_dtype)
        loaded = load_backend(backend, settings, progress)
        return cls(loaded, time.perf_counter() - start, max_session_bytes=max_session_bytes)

    def open(
        self,
        documents: Source | Sequence[Source],
        *,
        retrieval: Retrieval | None = None,
        reserve_tokens: int | None = None,
        template: Template = DEFAULT_TEMPLATE,
        prefill: bool = True,
        progress: StageProgress | None = None,
    ) -> Session:
        """Read and index documents (paths, or `Document`s), and have the target read them once.

        reserve_tokens  room kept for question and answer; a text that then exceeds the window is cut in the
                        middle, and the session's `warnings` say by how much.
        prefill         False leaves the target's reading to the first question that needs it.
        Raises `DocumentError` for a document that cannot be read or is empty.
        """
        session = Session(
            self,
            read_documents(documents),
            retrieval=retrieval or Retrieval(),
            reserve_tokens=DEFAULT_RESERVE if reserve_tokens is None else reserve_tokens,
            template=template,
        )
        if prefill:
            session.prefill(progress)
        return session

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        documents: Source | Sequence[Source] | None = None,
        retrieval: Retrieval | None = None,
    ) -> Session:
        """The session that `Session.save` wrote to `path`, without reading the documents again.

        documents  what it must be about; None takes the saved ones unseen.
        retrieval  None takes the saved settings.
        Raises `SessionError` where the file is damaged or of another format, model, dtype or documents.
        """
        from rapid import store

        given = None if documents is None else read_documents(documents)
        start = time.perf_counter()
        path = Path(path)
        with store.reading(path) as saved:
            saved.require_fit(path, self.backend.open(), given)
            session = Session(
                self,
                given or saved.documents,
                retrieval=retrieval or saved.retrieval,
                reserve_tokens=saved.reserve_tokens,
                template=saved.template,
            )
            session.adopt(saved.state, start)
        return session

    def embedder(self, retrieval: Retrieval) -> Embedder | None:
        """The embedder a ranking needs, loaded once; None for one by words alone."""
        if retrieval.ranking == "bm25":
            return None
        from rapid.retrieval.embed import load_embedder

        if retrieval.embedder not in self._embedders:
            self._embedders[retrieval.embedder] = load_embedder(retrieval.embedder)
        return self._embedders[retrieval.embedder]

    def resolve(self, speculation: Speculation) -> Resolved:
        """What `speculation` means for these models. Raises `VocabularyMismatch` where they cannot do it."""
        return resolve(speculation, self.backend)

    def take_load_seconds(self) -> float:
        """Seconds spent loading, for the first session to report; 0 for later ones."""
        seconds, self._load_s = self._load_s, 0.0
        return seconds
