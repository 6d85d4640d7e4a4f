"""What a model is, without loading it: its config and its size, from its directory, its GGUF header, or the hub.

A GGUF header is read here: the gguf package wants the whole file in one piece, and takes seconds to look at it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rapid.errors import ModelError
from rapid.models.sources import GGUF_MAGIC, Source, first_line

# GGUF names (after the architecture's prefix) and the transformers config entries they stand for.
_ENTRIES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "expert_count": "num_local_experts",
    "vocab_size": "vocab_size",
}
# GGUF value types: u8 i8 u16 i16 u32 i32 f32 bool, string, array, u64 i64 f64.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LONGEST = 2**26  # bytes of a string, entries of an array: more is damage


def read_config(source: Source) -> Mapping[str, Any]:
    """The entries of a transformers config. Raises `ModelError` where they cannot be read."""
    if source.kind == "gguf":
        return _gguf_header(source)[0]
    path = Path(source.location, "config.json") if source.kind == "directory" else _hub_config(source.location)
    return read_config_file(path)


def count_parameters(source: Source) -> int | None:
    """Numbers in the weight files of a model on this machine; None for one on the hub. Raises `ModelError`."""
    if source.kind == "gguf":
        return sum(_gguf_header(source)[1].values())
    if source.kind == "hub":
        return None
    try:
        headers = [_safetensors_header(path) for path in Path(source.location).glob("*.safetensors")]
        return sum(math.prod(map(int, t["shape"])) for h in headers for name, t in h.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(
            f"the weights of {source.name} cannot be read ({first_line(error)}); get the model again"
        ) from None


def read_config_file(path: Path) -> Mapping[str, Any]:
    """A config.json; of a multimodal model, the part of its language model."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({first_line(error)}); give a model's config.json") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object; give a model's config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _hub_config(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    # The hub's client raises its own errors, OSError and its HTTP library's, depending on what fails.
    except Exception as error:
        raise ModelError(
            f"the config of {hub_id} cannot be fetched ({first_line(error)}); download it elsewhere and give its file"
        ) from None


def _safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = _unpack(file, "Q")
        if length > _LONGEST:
            raise ValueError("damaged")
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def _gguf_header(source: Source) -> tuple[dict[str, Any], dict[str, int]]:
    """The config, and each tensor's number of values."""
    try:
        with source.files[0].open("rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise ValueError("no GGUF file")
            version, num_tensors, num_entries = _unpack(file, "IQQ")
            if version < 2:
                raise ValueError(f"GGUF version {version}")
            entries: dict[str, Any] = {}
            for _ in range(num_entries):
                name = _string(file)
                entries[name] = _value(file, *_unpack(file, "I"))
            tensors = dict(_tensor(file) for _ in range(num_tensors))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"the header of {source.name} cannot be read ({first_line(error)}); {source.repair}") from None
    architecture = entries.get("general.architecture", "")
    config = {ours: entries.get(f"{architecture}.{theirs}") for theirs, ours in _ENTRIES.items()}
    config["vocab_size"] = config["vocab_size"] or entries.get("tokenizer.ggml.tokens")  # an array's length
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["model_type"] = architecture
    return {name: value for name, value in config.items() if value is not None}, tensors


def _unpack(file: BinaryIO, format_: str) -> tuple[Any, ...]:
    size = struct.calcsize(f"<{format_}")
    return struct.unpack(f"<{format_}", file.read(size))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _LONGEST:
        raise ValueError("damaged")
    return file.read(length).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """A scalar or a string; of an array its length, all that is wanted of one here."""
    if kind in _SCALARS:
        return _unpack(file, _SCALARS[kind])[0]
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise ValueError(f"a value of type {kind}")
    inner, length = _unpack(file, "IQ")
    if length > _LONGEST:
        raise ValueError("damaged")
    if inner in _SCALARS:
        file.seek(length * struct.calcsize(f"<{_SCALARS[inner]}"), 1)
    else:
        for _ in range(length):
            _value(file, inner)
    return length


def _tensor(file: BinaryIO) -> tuple[str, int]:
    name = _string(file)
    (dimensions,) = _unpack(file, "I")
    if dimensions > 8:
        raise ValueError("damaged")
    sizes = _unpack(file, "Q" * dimensions)
    _unpack(file, "IQ")  # type and offset
    return name, math.prod(sizes)
