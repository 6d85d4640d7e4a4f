"""`rapid models`: what can be named as --target, --drafter and --embedder here, and where it came from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """List the models that come as packages or were converted on this machine."""
    from rapid.models.weights import describe_models

    found = describe_models()
    if as_json:
        rows: list[dict[str, Any]] = [
            {key: str(value) if key in ("path", "converted") and value else value for key, value in vars(m).items()}
            for m in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for model in found:
        size = f"{model.size_bytes / 1e6:,.0f} MB" if model.size_bytes else "-"
        window = f"{model.window:,} tokens" if model.window else "-"
        typer.echo(f"{model.name}  ({model.title}, {model.role})")
        typer.echo(f"    window {window}, {size}, licence: {model.licence}")
        typer.echo(f"    from {model.path}" if model.installed else f"    not installed: {model.install}")
        if model.converted and model.converted != model.path:
            typer.echo(f"    converted to {model.converted}")
    typer.echo("\nAlso accepted: a hub id (owner/name), a directory with config.json and .safetensors, a .gguf file.")
