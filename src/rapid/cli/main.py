"""The `rapid` command: commands are registered here, and every error leaves as one line on stderr, exit 2."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from rapid import __version__
from rapid.cli.ask import ask
from rapid.cli.bench import app as bench
from rapid.cli.chat import chat
from rapid.cli.evals import app as evals
from rapid.cli.models import models
from rapid.cli.plan import plan
from rapid.cli.waiting import wait_by_load
from rapid.errors import RapidError

app = typer.Typer(
    name="rapid",
    help="Ask long documents questions with open-weight language models (RAPID: retrieval-augmented speculative "
    "decoding).",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(ask)
app.command()(chat)
app.command()(models)
app.command()(plan)
app.add_typer(evals)
app.add_typer(bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rapid {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; the process exits with its status."""
    wait_by_load()  # before PyTorch is loaded
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no error
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status: 0, 2 for bad usage or input, 130 when interrupted, else 1."""
    try:
        status = app(arguments or ["--help"], prog_name="rapid", standalone_mode=False) or 0
        sys.stdout.flush()
        # typer turns an interrupt into this status, and says nothing.
        return _fail("interrupted", 130) if status == 130 else status
    except RapidError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except OSError as error:
        # What could not be written now must not be tried once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader of our output went away (`| head`): nothing more to say, and nobody to say it to.
        return 1 if isinstance(error, BrokenPipeError) else _fail(f"cannot read or write: {error}", 1)
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None or getattr(error, "exit_code", None) is None:
            raise
        return _fail(f"{message()} (see {_help_for(error)})", 2)


def _help_for(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"`{context.command_path} --help`" if context else "`rapid --help`"


def _fail(message: str, status: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"rapid: {line}\n")
    return status
