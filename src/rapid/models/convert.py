"""GGUF to safetensors, once: float32 in the user's cache, complete or absent.

A conversion is written to a temporary sibling directory and renamed, under one lock for the whole cache, so
that a killed process leaves no half model and a second process waits for the first and uses its result.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid.errors import ModelError
from rapid.models.quiet import quiet
from rapid.models.sources import Source, first_line, models_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# called with (what is being done, fraction finished) while a model is made ready
LoadProgress = Callable[[str, float], None]

BYTES_PER_WEIGHT = 4  # float32
SPARE_BYTES = 64 << 20  # tokenizer, configuration and slack of the file system
WAY_OUT = "free some space there or set RAPID_CACHE_DIR to another directory"
_BLOCK = 1 << 20
_CHAT_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>")


def converted(source: Source, progress: LoadProgress | None = None) -> Path:
    """The directory with `source` (a gguf) as safetensors, made if it is not there. Raises `ModelError`."""
    say = progress or (lambda stage, fraction: None)
    try:
        sha256 = source.sha256 or sha256_of(source.files)
        target = models_dir() / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', source.name)}-{sha256[:12]}"
        if target.is_dir():
            return target
        models_dir().mkdir(parents=True, exist_ok=True)
        with _lock(say):
            if not target.is_dir():
                _make(source, target, say)
    except OSError as error:
        raise ModelError(_not_written(source, error)) from error
    return target


def sha256_of(files: Iterable[Path]) -> str:
    """The hash of the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


@contextmanager
def _lock(say: LoadProgress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(models_dir() / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say("waiting for another process that converts a model", 0.0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(source: Source, target: Path, say: LoadProgress) -> None:
    # The lock is ours, so whatever temporary directory lies here was left by a process that died.
    for stale in target.parent.glob(".*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    work = target.parent / f".{target.name}.tmp"
    work.mkdir()
    try:
        say(f"checking {source.name}", 0.0)
        if source.sha256 and sha256_of(source.files) != source.sha256:
            raise ModelError(f"model {source.name} is damaged: its sha256 is wrong; {source.repair}")
        _write(source, work, say)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(source: Source, work: Path, say: LoadProgress) -> None:
    """Fill `work` with config, weights, generation config, tokenizer and chat template."""
    gguf = _one_file(source.files, work)
    say(f"converting {source.name} (once): tokenizer", 0.05)
    tokenizer = _from_gguf("AutoTokenizer", gguf, source)
    _join_chat_markers(tokenizer)
    say(f"converting {source.name} (once): weights", 0.25)
    model, info = _from_gguf("AutoModelForCausalLM", gguf, source, dtype="float32", output_loading_info=True)
    if info["missing_keys"]:
        raise ModelError(f"{source.location} is incomplete: {min(info['missing_keys'])} is missing; get the file again")
    _require_space(work, model.num_parameters() * BYTES_PER_WEIGHT + SPARE_BYTES, source.name)
    # transformers will not save a model it still takes for a quantised one; the weights are float32 now.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    say(f"converting {source.name} (once): writing", 0.9)
    with quiet():
        try:
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        # A full disk is an OSError of Python or a SafetensorError, which is none.
        except Exception as error:
            raise ModelError(_not_written(source, error)) from error
    if len(source.files) > 1:
        gguf.unlink()
    say(f"converted {source.name}", 1.0)


def _from_gguf(auto_class: str, gguf: Path, source: Source, **kwargs: Any) -> Any:
    import transformers

    # The bar over the tensors is not one of those that transformers lets be switched off.
    with quiet(), redirect_stderr(io.StringIO()):
        try:
            return getattr(transformers, auto_class).from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, local_files_only=True, trust_remote_code=False, **kwargs
            )
        # A damaged or foreign file surfaces as nearly any exception of gguf, numpy or transformers.
        except Exception as error:
            raise ModelError(
                f"{source.location} cannot be loaded: {first_line(error)}; it may be damaged, or of a kind "
                "that transformers does not read: try the model's safetensors version"
            ) from error


def _not_written(source: Source, error: Exception) -> str:
    return f"model {source.name} cannot be converted into {models_dir()}: {first_line(error)}; {WAY_OUT}"


def _one_file(files: tuple[Path, ...], work: Path) -> Path:
    if len(files) == 1:
        return files[0]
    _require_space(work, sum(path.stat().st_size for path in files), files[0].name)
    joined = work / "joined.gguf"
    with joined.open("wb") as out:
        for path in files:
            with path.open("rb") as part:
                shutil.copyfileobj(part, out, _BLOCK)
    return joined


def _require_space(directory: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelError(
            f"model {name} needs {needed / 1e9:.2f} GB in {models_dir()}, where {free / 1e9:.2f} GB are free; {WAY_OUT}"
        )


def _join_chat_markers(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make every marker of the chat template one token, where the file forgot to mark it as special."""
    from tokenizers import AddedToken

    markers = set(_CHAT_MARKER.findall(tokenizer.chat_template or "")) & tokenizer.get_vocab().keys()
    split = [m for m in sorted(markers) if len(tokenizer.encode(m, add_special_tokens=False)) != 1]
    tokenizer.add_tokens([AddedToken(m, special=True, normalized=False) for m in split], special_tokens=True)
