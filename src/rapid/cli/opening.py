"""From what a command line names (models, documents, a session's file) to an open session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rapid.cli.progress import stage_progress
from rapid.errors import InvalidParameter
from rapid.params import Models, Retrieval

if TYPE_CHECKING:
    from rapid.engine import Engine
    from rapid.session import Session
    from rapid.types import Document, StageProgress


@dataclass(frozen=True)
class Opening:
    """`session` is the file that keeps the documents as read; `documents` may be empty where it exists."""

    documents: list[str]
    session: str | None
    retrieval: Retrieval
    models: Models

    def open(self, reserve: Callable[[Engine], int], *, prefill: bool = True) -> Session:
        """Check what else needs no model, then load the models and read the documents, or restore them.

        `reserve` gives the tokens to keep free for questions and answers.
        """
        from rapid.documents import read_documents
        from rapid.sealed import check_destination

        saved = self.session is not None and os.path.lexists(self.session)
        if not self.documents and not saved:
            raise InvalidParameter(
                "no document given; name at least one file, or a --session FILE that exists (see `rapid --help`)"
            )
        texts = read_documents(self.documents) if self.documents else None
        if self.retrieval.unrelated is not None:
            read_documents(self.retrieval.unrelated)
        if self.session is not None and texts is not None:
            check_destination(Path(self.session))

        from rapid.engine import DEFAULT_RESERVE, Engine

        with stage_progress() as progress:
            engine = Engine.load(**asdict(self.models), progress=progress)
            if saved and (session := self._restored(engine, texts)):
                return session
            assert texts is not None
            if self.session is None:
                return self._read(engine, texts, reserve(engine), prefill, progress)
            # Later questions may be longer than this one.
            session = self._read(engine, texts, max(reserve(engine), DEFAULT_RESERVE), True, progress)
            session.save(self.session)
            return session

    def _read(
        self, engine: Engine, texts: list[Document], reserve_tokens: int, prefill: bool, progress: StageProgress | None
    ) -> Session:
        return engine.open(
            texts, retrieval=self.retrieval, reserve_tokens=reserve_tokens, prefill=prefill, progress=progress
        )

    def _restored(self, engine: Engine, texts: list[Document] | None) -> Session | None:
        """The saved session; None where it does not fit, but the documents are there to read them again."""
        from rapid.errors import ModelError, SessionError

        assert self.session is not None
        # Settings that were not given are the saved ones.
        retrieval = None if self.retrieval == Retrieval() else self.retrieval
        try:
            return engine.restore(self.session, documents=texts, retrieval=retrieval)
        except (SessionError, ModelError) as error:
            if texts is None:
                raise
            sys.stderr.write(f"rapid: note: {error}: that is done now\n")
            return None
