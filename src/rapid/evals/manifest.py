"""What a run was: its settings, models and data, which a resumed run must share; its environment, which is
recorded only."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rapid.errors import InvalidParameter

# The parts of a manifest that decide the answers.
IDENTITY = ("settings", "models", "data")

_PACKAGES = ("rapid-decoding", "torch", "transformers", "tokenizers", "sentence-transformers", "numpy", "rouge-score")


def make_manifest(*, settings: Mapping[str, Any], models: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest of this process. `models` and `data` map names to hashes or whatever else identifies them."""
    return {
        "settings": dict(settings),
        "models": dict(models),
        "data": dict(data),
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Versions and hardware, without importing what is reported."""
    versions = {package: _version(package) for package in _PACKAGES}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {package: found for package, found in versions.items() if found is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def check_same_run(old: Mapping[str, Any], new: Mapping[str, Any], directory: Path) -> None:
    """Raise `InvalidParameter` that names the first difference in what decides the answers."""
    before, after = _flat(old), _flat(new)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise InvalidParameter(
                f"{directory} holds a run with {name} = {_shown(before.get(name))}, not {_shown(after.get(name))}; "
                f"give another --output, or the same settings to resume it"
            )


def _flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a manifest, nested names joined by dots, values as they come back from JSON."""
    flat: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        else:
            flat[name] = value

    for part in IDENTITY:
        add(part, json.loads(json.dumps(manifest.get(part, {}))))
    return flat


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
