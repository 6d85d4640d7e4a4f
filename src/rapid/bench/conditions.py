"""Under which conditions a benchmark ran: recorded in every report."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rapid.evals.identity import identify
from rapid.evals.manifest import environment
from rapid.params import drafter_bits

if TYPE_CHECKING:
    from rapid.backends.local import LocalBackend


def conditions(backend: LocalBackend, *, malloc: dict[str, int | None], dtype: str, **further: Any) -> dict[str, Any]:
    """Machine, versions, models and settings of this process; `further` is what the benchmark adds."""
    import torch

    machine = environment()
    packages = machine.pop("packages")
    return {
        "model": identify(backend.target.name),
        "drafter": _drafter(backend),
        "hardware": machine["processor"],
        "system": machine["system"],
        "cores": machine["cores"],
        "threads": torch.get_num_threads(),
        "device": str(backend.target_model.device),
        "dtype": dtype,
        "packing": "float16" if backend.target_model.packed else None,
        "attention": backend.target_model.model.config._attn_implementation,
        "malloc": malloc,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": {
            "python": machine["python"],
            "torch": packages.get("torch"),
            "transformers": packages.get("transformers"),
            "rapid": packages.get("rapid-decoding"),
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["rapid", *sys.argv[1:]]),
        **further,
    }


def _drafter(backend: LocalBackend) -> dict[str, Any]:
    name = "self" if backend.self_speculation else backend.drafter.name
    return {"name": name} if drafter_bits(name) else identify(name)
