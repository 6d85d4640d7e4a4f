"""What tells one model from another of the same name: a hash of its files, or its commit on the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rapid.models.sources import TOKENIZER_FILES, Source, resolve

_BLOCK = 2**20
_CONFIGS = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json")


def identify(name: str) -> dict[str, Any]:
    """The model's name and its identity, for a manifest. Raises `ModelError` for what is no model."""
    if name.partition(":")[0] == "self":  # the target's own weights, or a quantised copy of them
        return {"name": name}
    source = resolve(name)
    if source.kind == "hub":
        return {"name": source.name, "commit": _commit(source)}
    # A directory's own place is nobody's business: two copies of a model are the same model.
    shown = name if name == source.name and not Path(name).is_dir() else Path(source.location).name
    return {"name": shown, "sha256": source.sha256 or _hash(_files(source))}


def _files(source: Source) -> list[Path]:
    if source.kind == "gguf":
        return list(source.files)
    wanted = {*TOKENIZER_FILES, *_CONFIGS}
    return sorted(p for p in Path(source.location).iterdir() if p.name in wanted or p.suffix == ".safetensors")


def _hash(paths: list[Path]) -> str:
    """SHA-256 of the files' names and contents; one file alone is hashed as it is."""
    digest = hashlib.sha256()
    for path in paths:
        if len(paths) > 1:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _commit(source: Source) -> str | None:
    """The commit that the hub's cache holds of a model; None where it is not there (any more)."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.location, "config.json")
    return Path(found).parent.name if isinstance(found, str) else None
