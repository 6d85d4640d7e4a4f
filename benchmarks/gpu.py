"""What RAPID's decoding costs on a GPU: step times against the bandwidth bound, and tokens per second end to end.

    python benchmarks/gpu.py                      an 8B-shaped model on a CUDA device: under ten minutes, no network
    python benchmarks/gpu.py --tiny --device cpu  the same code in seconds, to see that it runs

From a checkout that is not installed, with PYTHONPATH=src: only torch and transformers are needed.

Weights and caches are random, so no draft would ever be accepted: how many tokens a round keeps is drawn from a
seeded *synthetic acceptance*, and labelled so. Everything else is real: forwards, acceptance kernels, rewinds, the
governor. Times are medians, by device events on CUDA. A JSON is written after each section, so a run that is cut
short leaves what it measured. No GPU has run this yet: what it would find is unmeasured.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_report import Report, print_tables, run_sections
from gpu_sections import Bench, Settings

CONTEXTS, DRAFT_CONTEXT = (8192, 32768, 65536, 131072), 5300
TINY_CONTEXTS, TINY_DRAFT_CONTEXT = (48, 160), 24
RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> Path:
    """Run, print the tables, and return where the JSON is."""
    args = _parse(arguments)
    settings = Settings(
        device=args.device,
        tiny=args.tiny,
        contexts=tuple(args.contexts or (TINY_CONTEXTS if args.tiny else CONTEXTS)),
        draft_context=TINY_DRAFT_CONTEXT if args.tiny else DRAFT_CONTEXT,
        tokens=args.tokens or (24 if args.tiny else 128),
        repeats=args.repeats,
        seconds=args.seconds,
        seed=args.seed,
    )
    torch.manual_seed(settings.seed)
    name = torch.cuda.get_device_name() if settings.device.startswith("cuda") else platform.machine() + "-cpu"
    default = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    report = Report(args.output or default, _conditions(settings, name))
    bench = Bench(settings)
    report.conditions["parameters"] = bench.shape.num_parameters
    run_sections(bench.sections(), report, settings.seconds, lambda line: sys.stderr.write(f"{line}\n"))
    print_tables(report, sys.stdout)
    sys.stdout.write(f"\n{report.path}\n")
    return report.path


def _conditions(settings: Settings, name: str) -> dict[str, Any]:
    return {
        **vars(settings),
        "contexts": list(settings.contexts),
        "device_name": name,
        "model": "tiny random Llama" if settings.tiny else "Llama-3.1-8B's shape, random weights",
        "cache": "random keys and values",
        "acceptance": "synthetic: a seeded draw decides how many draft tokens are kept; no model's figure",
        "temperature": 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers and short contexts")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens in the target's cache, ascending")
    parser.add_argument("--tokens", type=int, help="tokens decoded in each end-to-end run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0, help="time for all sections")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu-DEVICE.json")
    args = parser.parse_args(arguments)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device; see that it runs with --tiny --device cpu")
    return args


if __name__ == "__main__":
    main()
