"""Finds, converts and loads a causal language model with its tokenizer.

transformers does the loading; never with code from a model's repository, never from pickled weights, and
without a word to the hub for a model that is on this machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid.errors import InvalidParameter, ModelError
from rapid.models.convert import LoadProgress, converted
from rapid.models.quiet import quiet
from rapid.models.sources import (
    PACKAGED_MODELS,
    PackagedModel,
    Role,
    Source,
    first_line,
    models_dir,
    require_causal,
    resolve,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "LoadProgress",
    "ModelInfo",
    "Source",
    "describe_models",
    "eos_token_ids",
    "load_weights",
    "resolve",
]

DTYPES = ("float32", "bfloat16", "float16")
HUB_TIMEOUT_S = 10.0


def load_weights(
    source: Source, *, dtype: str = "float32", device: str = "cpu", progress: LoadProgress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model in eval mode, without gradients, on `device`, and its fast tokenizer. Raises `ModelError`."""
    if dtype not in DTYPES:
        raise InvalidParameter(f"dtype must be one of {', '.join(DTYPES)} or float32-packed, got {dtype!r}")
    _require_device(device)
    location = str(converted(source, progress)) if source.kind == "gguf" else source.location
    if progress:
        progress(f"loading {source.name}", 0.0)
    with quiet():
        try:
            model, tokenizer, missing = _load(location, source, dtype, device)
        except ModelError:
            raise
        # transformers, safetensors, tokenizers and torch raise nearly anything here; the user needs one line.
        except Exception as error:
            raise ModelError(_load_failure(source, location, error)) from error
    if missing:
        raise ModelError(f"{source.name} is incomplete: weight {min(missing)} is missing; get the model again")
    if not tokenizer.is_fast or not len(tokenizer):
        raise ModelError(f"{source.name} has no fast tokenizer; use a model that comes with a tokenizer.json")
    if progress:
        progress(f"loaded {source.name}", 1.0)
    return model, tokenizer


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Every id that ends an answer: of the generation config, config, tokenizer, and the turn end of the chat
    template; ids that model or tokenizer do not know are dropped."""
    config = model.config.get_text_config(decoder=True)
    generation_config = getattr(model, "generation_config", None)
    named = [
        getattr(generation_config, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        tokenizer.eos_token_id,
        _turn_end_id(tokenizer),
    ]
    flat: set[int] = set()
    for ids in named:
        flat.update(ids if isinstance(ids, list | tuple | set) else [] if ids is None else [ids])
    known = set(tokenizer.get_vocab().values())
    return frozenset(i for i in flat if i in known and i < config.vocab_size)


@dataclass(frozen=True)
class ModelInfo:
    """A model this installation knows, for `rapid models`. `path` and `size_bytes` are None if not there."""

    name: str
    title: str
    role: Role
    installed: bool
    install: str
    path: Path | None
    size_bytes: int | None
    window: int | None
    licence: str
    converted: Path | None


def describe_models() -> list[ModelInfo]:
    """The packaged models and embedder, then other models that were converted into the cache."""
    packaged = [_describe_packaged(p) for p in PACKAGED_MODELS]
    claimed = {info.converted for info in packaged}
    directories = sorted(p for p in models_dir().glob("*") if p.is_dir() and not p.name.startswith("."))
    return packaged + [_describe_converted(p) for p in directories if p not in claimed]


def _load(location: str, source: Source, dtype: str, device: str) -> tuple[Any, Any, set[str]]:
    """Model, tokenizer, and the names of weights that the files lack. Any: transformers' types are unions."""
    import torch
    import transformers

    auto_model: Any = transformers.AutoModelForCausalLM
    online = source.kind == "hub" and _hub_answers(source.location)
    common: dict[str, Any] = {"trust_remote_code": False, "local_files_only": not online}
    config = transformers.AutoConfig.from_pretrained(location, **common)
    require_causal(config.architectures, source.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(location, use_fast=True, **common)
    model, info = auto_model.from_pretrained(
        location,
        config=config,
        dtype=getattr(torch, dtype),
        use_safetensors=True,
        output_loading_info=True,
        **common,
    )
    return model.to(device).eval().requires_grad_(False), tokenizer, set(info["missing_keys"])


def _hub_answers(hub_id: str) -> bool:
    """Whether the hub can be reached; if not, its local cache is used at once, without the hub's retries."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        return True  # it answered, if only with a refusal that loading will report
    except Exception:  # offline mode, no route, no name, no answer in time: each its own class
        return False
    return True


def _load_failure(source: Source, location: str, error: Exception) -> str:
    reason = first_line(error)
    if "trust_remote_code" in str(error):
        return f"{source.name} needs code of its own, which is never run here; choose a model transformers knows"
    if source.kind == "hub":
        return (
            f"{source.name} cannot be loaded from the model hub: {reason}; check the id and the network, or "
            "give a local directory with config.json and .safetensors"
        )
    if source.kind == "gguf":
        return f"{source.name} cannot be loaded: {reason}; delete {location} and it is made again"
    return f"{source.name} cannot be loaded: {reason}; check its files or get the model again"


def _require_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    # torch raises RuntimeError for an unknown name and AssertionError where it was built without that device.
    except Exception as error:
        raise ModelError(f"device {device!r} cannot be used here ({first_line(error, 100)}); use cpu") from error


def _turn_end_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The special token that the chat template sets right after an assistant message, if any."""
    if not tokenizer.chat_template:
        return None
    content = "the-assistant-says"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": content}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a template is a program of the model's author and may fail in any way
        return None
    rest = text.rpartition(content)[2].lstrip()
    special = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    ends = [token for token in special if rest.startswith(token)]
    return special[max(ends, key=len)] if ends else None


def _describe_packaged(packaged: PackagedModel) -> ModelInfo:
    files = packaged.locate()
    target = models_dir() / f"{packaged.name}-{(packaged.sha256 or '')[:12]}"
    return ModelInfo(
        name=packaged.name,
        title=packaged.title,
        role=packaged.role,
        installed=files is not None,
        install=packaged.install,
        path=files[0] if files else None,
        size_bytes=sum(_size(path) for path in files) if files else None,
        window=packaged.window,
        licence=packaged.licence,
        converted=target if packaged.sha256 and target.is_dir() else None,
    )


def _describe_converted(directory: Path) -> ModelInfo:
    try:
        window = json.loads((directory / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        window = None
    return ModelInfo(
        name=str(directory),
        title=directory.name.rpartition("-")[0],
        role="language model",
        installed=True,
        install="",
        path=directory,
        size_bytes=_size(directory),
        window=window,
        licence="as its .gguf file says",
        converted=directory,
    )


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size
