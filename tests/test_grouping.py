"""Options that commands share: a dataclass parameter becomes an option for each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from rapid.cli.grouping import grouped


@dataclass(frozen=True)
class Shape:
    sides: Annotated[int, typer.Option(help="How many.", min=3)] = 4
    label: Annotated[str | None, typer.Option("--name", help="What to call it.")] = None


@dataclass(frozen=True)
class Colour:
    red: Annotated[float, typer.Option(help="Share of red.")]
    tags: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None


def draw(
    file: Annotated[str, typer.Argument(help="Where.")],
    *,
    shape: Shape,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing.")] = False,
    colour: Colour,
) -> None:
    """Draw it."""
    typer.echo(repr((file, shape, quiet, colour)))


def call(*arguments: str):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(grouped(draw))
    return CliRunner().invoke(app, list(arguments))


def test_given_values_and_defaults_reach_the_command_as_its_dataclasses():
    result = call("out.png", "--sides", "5", "--name", "house", "--red", "0.5", "--tags", "a", "--tags", "b", "--quiet")
    assert result.output.strip() == repr(("out.png", Shape(5, "house"), True, Colour(0.5, ["a", "b"])))
    assert call("out.png", "--red", "1").output.strip() == repr(("out.png", Shape(), False, Colour(1.0)))


def test_help_requirements_and_bounds_are_those_of_the_fields():
    shown = call("--help").output
    assert "Draw it." in shown
    assert "--quiet" in shown
    assert shown.index("--sides") < shown.index("--name") < shown.index("--red")
    assert "[default: 4;" in shown
    assert call("out.png").exit_code == 2
    assert call("out.png", "--red", "1", "--sides", "2").exit_code == 2


def test_one_name_twice_is_refused():
    def twice(*, shape: Shape, sides: Annotated[int, typer.Option()] = 1) -> None: ...

    with pytest.raises(ValueError, match="sides"):
        grouped(twice)
