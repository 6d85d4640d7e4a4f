"""`rapid plan`: what a model and a context will cost in memory and time, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rapid.cli import options
from rapid.cli.lists import whole_numbers
from rapid.cli.tables import number, table
from rapid.errors import InvalidParameter

if TYPE_CHECKING:
    from rapid.planning import Hardware, ModelShape, Plan

_WINDOW_UNKNOWN = 2**31


def plan(
    target: options.Target = "embedded",
    drafter: options.Drafter = "self",
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Plan for this config.json instead of --target.")
    ] = None,
    contexts: Annotated[
        str, typer.Option(help="Document lengths in tokens, comma-separated.")
    ] = "4096,8192,16384,32768,65536,131072",
    hardware: Annotated[
        str, typer.Option(help="a800, h100, h200, cpu (one AVX2 core), or measured: this machine's processor, now.")
    ] = "measured",
    dtype: Annotated[
        str | None, typer.Option(help="As for `rapid ask`.  [default: float32 on a processor, else the config's]")
    ] = None,
    retrieved: Annotated[
        int | None, typer.Option(help="Tokens the drafter reads.  [default: the rule of `rapid ask`]", min=1)
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(help="Tokens drafted per round (gamma).", min=1)] = 10,
    acceptance_rate: Annotated[float, typer.Option(help="Share of drafted tokens that are kept.")] = 0.8,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Predict memory and speed by context from the model's config, without loading it."""
    from rapid import planning

    described = _config(target, config)
    named = dtype or ("float32" if hardware in ("cpu", "measured") else None)
    shape = planning.ModelShape.from_config(described, named)
    draft = _drafter(drafter, shape, named)
    window = int(described.get("max_position_embeddings") or _WINDOW_UNKNOWN)
    lengths = _contexts(contexts)
    machine, free = _hardware(hardware)
    plans = [
        planning.plan(
            shape,
            machine,
            context,
            drafter=draft,
            retrieved=retrieved or _retrieved(context, window),
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            acceptance_rate=acceptance_rate,
        )
        for context in lengths
    ]
    name = config or target
    if as_json:
        typer.echo(json.dumps(_report(name, drafter, shape, machine, free, window, plans)))
    else:
        typer.echo(_text(name, shape, machine, free, window, plans))


def _config(name: str, file: str | None) -> Any:
    from rapid.models.config import read_config, read_config_file
    from rapid.models.sources import resolve

    return read_config_file(Path(file)) if file else read_config(resolve(name))


def _drafter(name: str, target: ModelShape, dtype: str | None) -> ModelShape | None:
    """None where the drafter is the target itself."""
    from rapid.params import drafter_bits
    from rapid.planning import ModelShape

    if name == "self":
        return None
    if bits := drafter_bits(name):
        return replace(target, linear_bits=bits)
    return ModelShape.from_config(_config(name, None), dtype)


def _hardware(name: str) -> tuple[Hardware, int]:
    """The machine, and the bytes of memory that are to be had there."""
    from rapid.backends.memory import available_bytes
    from rapid.planning import HARDWARE, measure_host

    if name != "measured" and name not in HARDWARE:
        raise InvalidParameter(f"--hardware must be measured or one of {', '.join(HARDWARE)}, got {name!r}")
    if name in ("measured", "cpu"):
        free = available_bytes("cpu")
        return (measure_host(free) if name == "measured" else HARDWARE[name]), free
    return HARDWARE[name], HARDWARE[name].memory_bytes


def _retrieved(context: int, window: int) -> int:
    from rapid.retrieval.select import context_budget

    return min(context, context_budget(context, max(window, context)))


def _contexts(text: str) -> list[int]:
    if found := whole_numbers("--contexts", text):
        return found
    raise InvalidParameter(f"--contexts must be whole numbers with commas between them, got {text!r}")


def _report(
    name: str, drafter: str, shape: ModelShape, machine: Hardware, free: int, window: int, plans: list[Plan]
) -> dict[str, Any]:
    return {
        "target": name,
        "drafter": drafter,
        "model": {**asdict(shape), "num_parameters": shape.num_parameters, "window": window},
        "hardware": asdict(machine),
        "available_bytes": free,
        "plans": [
            {**asdict(p), "fits": p.peak_bytes <= free, "within_window": p.context + p.max_new_tokens <= window}
            for p in plans
        ],
    }


def _text(name: str, shape: ModelShape, machine: Hardware, free: int, window: int, plans: list[Plan]) -> str:
    gib = 2**30
    rows = [
        [
            f"{p.context:,}" + ("" if p.context + p.max_new_tokens <= window else "*"),
            f"{p.retrieved:,}",
            number(p.target_cache_bytes / gib),
            number(p.draft_cache_bytes / gib),
            number(p.peak_bytes / gib),
            "yes" if p.peak_bytes <= free else "NO",
            number(p.prefill_s, 1),
            number(1 / p.decode_s, 1),
            number(1e3 * p.verify_s, 1),
            number(1e3 * p.draft_step_s, 1),
            number(p.speed_up),
        ]
        for p in plans
    ]
    columns = ["context", "retrieved", "cache", "draft cache", "peak GiB", "fits", "prefill s", "decode tok/s"]
    dtype = shape.dtype + (f" with {shape.linear_bits}-bit linear layers" if shape.linear_bits else "")
    lines = [
        f"{name}: {shape.num_parameters / 1e6:,.0f} M parameters, {shape.weight_bytes / gib:.2f} GiB as {dtype}; "
        f"{machine.name}, {free / gib:.1f} GiB free",
        table([*columns, "verify ms", "draft ms", "speed-up"], rows),
        f"speed-up: of drafting {plans[0].num_draft_tokens} tokens a round, {plans[0].acceptance_rate:.0%} of them "
        "kept, over decoding the target alone",
    ]
    if any(p.context + p.max_new_tokens > window for p in plans):
        lines.append(f"* with its answer longer than the model's window of {window:,} tokens")
    return "\n".join(lines)
